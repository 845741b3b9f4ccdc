"""The server answers the real client as the Hub does, so that a green push test means something."""

import huggingface_hub
import pytest
from hub_server import OTHER, OWNER, READER
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

pytest_plugins = ["fixtures_hub"]


@pytest.fixture
def api(online):
    online.create("alice/model")
    return HfApi(token=OWNER)


def test_a_commit_adds_and_deletes_and_the_old_revision_stays(api, online):
    first = api.create_commit("alice/model", [CommitOperationAdd("a.txt", b"one")], commit_message="one").oid
    operations = [CommitOperationAdd("b.safetensors", b"two"), CommitOperationDelete("a.txt")]
    second = api.create_commit("alice/model", operations, commit_message="two").oid
    assert online.paths("alice/model", second) == {".gitattributes", "b.safetensors"}
    assert online.content("alice/model", "a.txt", first) == b"one"


def test_a_commit_on_a_moved_parent_changes_nothing(api, online):
    parent = online.head("alice/model")
    head = online.write("alice/model", {"a.txt": b"meanwhile"})
    with pytest.raises(HfHubHTTPError) as failure:
        api.create_commit(
            "alice/model", [CommitOperationAdd("b.txt", b"b")], commit_message="late", parent_commit=parent
        )
    assert failure.value.response.status_code == 412 and online.head("alice/model") == head


def test_tree_and_paths_info_give_the_hashes_of_git(api, online):
    online.write("alice/model", {"d/a.txt": b"hello\n"})
    # `printf 'hello\n' | git hash-object --stdin`
    expected = "ce013625030ba8dba906f756967f9e9ca394464a"
    assert [file.blob_id for file in api.list_repo_tree("alice/model", "d", recursive=True)] == [expected]
    assert [file.blob_id for file in api.get_paths_info("alice/model", ["d/a.txt", "none"])] == [expected]


def test_a_range_gives_these_bytes_and_the_whole_size(api, online):
    online.write("alice/model", {"a.txt": b"0123456789"})
    url = huggingface_hub.hf_hub_url("alice/model", "a.txt")
    answer = get_session().get(url, headers={"Range": "bytes=2-4"})
    assert (answer.status_code, answer.content) == (206, b"234")
    assert answer.headers["Content-Range"] == "bytes 2-4/10"


def test_head_gives_size_etag_and_commit(api, online):
    head = online.write("alice/model", {"a.safetensors": b"0123456789"})
    metadata = huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url("alice/model", "a.safetensors"))
    # sha256 of 0123456789
    expected = "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"
    assert (metadata.size, metadata.etag, metadata.commit_hash) == (10, expected, head)


def test_the_branch_points_to_the_head(api, online):
    refs = api.list_repo_refs("alice/model")
    assert [(b.name, b.target_commit) for b in refs.branches] == [("main", online.head("alice/model"))]


def test_an_unknown_revision_is_told_from_an_unknown_repository(api):
    with pytest.raises(RevisionNotFoundError):
        api.model_info("alice/model", revision="v9")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("alice/nothing")


@pytest.mark.parametrize("token", [OTHER, False])
def test_a_private_repository_looks_missing_to_others(online, token):
    online.create("alice/secret", private=True)
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info("alice/secret", token=token)
    assert HfApi().model_info("alice/secret", token=READER).private


@pytest.mark.parametrize(("token", "status"), [(READER, 403), (OTHER, 403), ("nonsense", 401)])
def test_only_a_write_token_of_the_owner_writes(api, online, token, status):
    head = online.head("alice/model")
    with pytest.raises(HfHubHTTPError) as failure:
        api.create_commit("alice/model", [CommitOperationAdd("a", b"a")], commit_message="no", token=token)
    assert failure.value.response.status_code == status and online.head("alice/model") == head


def test_the_card_is_validated_before_a_file_is_sent(api, online):
    card = CommitOperationAdd("README.md", b"---\nmodel-index:\n- name: x\n  results:\n  - {}\n---\n")
    with pytest.raises(ValueError, match="model-index"):
        api.create_commit("alice/model", [card], commit_message="no")
    assert online.num_requests("POST", "preupload") == 0
