"""`vit-scratch push` and `verify` from the outside: the exit code, the one line, and the accuracy measured anew."""

import importlib

import pytest
from fixtures_training import call, pretrain_flags, refused
from hub_server import OWNER, READER
from huggingface_hub import ModelCard

from hub_upload.stage import stage

pytest_plugins = ["fixtures_hub"]
REPO = "alice/digits"


@pytest.fixture
def log_in(monkeypatch):
    def with_token(token: str | None) -> None:
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN", raising=False)

    return with_token


def test_push_prints_the_commit_and_where_it_is(uploading, run_folder, log_in):
    log_in(OWNER)
    done = call("push", run_folder, "--repo_id", REPO)
    commit = uploading.head(REPO)
    assert (done.code, done.out.split()) == (0, [commit, f"{uploading.url}/{REPO}/tree/{commit}"])


@pytest.mark.parametrize(("flags", "license"), [([], "apache-2.0"), (["--license", "mit"], "mit")])
def test_the_card_of_a_first_push_states_the_licence_that_was_asked_for(uploading, run_folder, log_in, flags, license):
    log_in(OWNER)
    assert call("push", run_folder, "--repo_id", REPO, *flags).code == 0
    assert ModelCard((run_folder / "hub" / "README.md").read_text()).data.license == license


@pytest.mark.parametrize(
    ("repo_id", "token", "words"),
    [
        (REPO, None, ["no token", "hf auth login"]),
        (REPO, READER, ["read-only", "write permission"]),
        (REPO, "nonsense", ["not valid", "hf auth login"]),
        ("alice/dig its", OWNER, ["'alice/dig its' is not a name", "owner/name"]),
        ("bob/digits", OWNER, ["may not create a repository for bob", "use alice"]),
    ],
)
def test_a_push_the_hub_will_not_take_ends_with_2_and_one_line(uploading, run_folder, log_in, repo_id, token, words):
    log_in(token)
    line = refused("push", run_folder, "--repo_id", repo_id)
    assert all(word in line for word in words)
    assert not (run_folder / "hub").exists() and uploading.num_requests("POST", "repos/create") == 0


def test_a_server_error_in_mid_upload_ends_with_3_and_one_line(uploading, run_folder, log_in):
    log_in(OWNER)
    uploading.create(REPO)
    head = uploading.head(REPO)
    uploading.faults.lfs_put_from = 2
    done = call("push", run_folder, "--repo_id", REPO)
    assert done.code == 3 and f"the repository is as it was, at {head}" in done.error_line
    assert uploading.head(REPO) == head


def test_a_refused_connection_ends_with_3_and_one_line(uploading, run_folder, log_in):
    log_in(OWNER)
    uploading.stop()
    done = call("push", run_folder, "--repo_id", REPO)
    assert done.code == 3 and "could not be reached" in done.error_line


def test_two_kinds_of_data_to_verify_on_are_refused_before_anything_is_pulled(hub):
    assert "--data_dir" in refused("verify", REPO, "--dataset_name", "digits", "--data_dir", "photos")
    assert hub.requests == []


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    done = call(*pretrain_flags(folder, test_fraction=0.2))
    assert done.code == 0, done.err
    return folder


@pytest.mark.usefixtures("uploading")
def test_verify_measures_the_accuracy_of_the_card_again(digits_run, tmp_path):
    folder = stage(digits_run, tmp_path / "staged")
    done = call("verify", folder, "--dataset_name", "digits")
    measured, stated = done.out.split("accuracy measured ")[1].split(", on the card ")
    assert done.code == 0 and float(measured) == float(stated)


@pytest.mark.usefixtures("uploading")
def test_verify_refuses_images_that_are_not_those_the_model_was_evaluated_on(digits_run, tmp_path):
    folder = stage(digits_run, tmp_path / "staged")
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("test_fraction: 0.2", "test_fraction: 0.3"))
    importlib.import_module("hub_upload.manifest").write_manifest(folder)
    done = call("verify", folder, "--dataset_name", "digits")
    assert done.code == 2 and "its test split is not the 360 images" in done.error_line
