"""What was published is pulled again and compared with its manifest, its golden and its card."""

import json
import subprocess

import pytest
from hub_server import OWNER
from safetensors.torch import load_file, save_file

from hub_upload.manifest import read_manifest, verify_manifest, write_manifest
from hub_upload.pull import pull
from hub_upload.push import push
from hub_upload.stage import stage
from hub_upload.verify import verify
from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

pytest_plugins = ["fixtures_hub"]
REPO = "alice/digits"


def test_a_pull_of_a_hash_gives_that_revision_after_a_newer_one(published, online, tmp_path):
    online.write(REPO, {"metrics.json": b"{}"})
    pulled = pull(REPO, tmp_path / "cache", revision=published.commit, token=OWNER)
    assert pulled.commit == published.commit
    assert read_manifest(pulled.folder) == verify_manifest(pulled.folder)


@pytest.mark.parametrize(
    ("repo_id", "revision", "said"),
    [("alice/nothing", None, "no such repository"), (REPO, "v9", "no such revision"), ("a/b/c", None, "not a name")],
)
def test_a_pull_of_what_is_not_there_says_so(online, tmp_path, repo_id, revision, said):
    online.create(REPO)
    with pytest.raises(InputError, match=said):
        pull(repo_id, tmp_path / "cache", revision=revision, token=OWNER)


def test_a_pull_from_a_server_that_is_not_there_is_the_environments_fault(online, tmp_path):
    online.stop()
    with pytest.raises(EnvironmentFault, match="could not be reached"):
        pull(REPO, tmp_path / "cache", token=OWNER)


def test_verify_finds_a_file_changed_on_the_hub(published, online):
    online.write(REPO, {"modeling_vit_scratch.py": online.content(REPO, "modeling_vit_scratch.py") + b"\n"})
    with pytest.raises(InputError, match=r"modeling_vit_scratch\.py has \d+ bytes"):
        verify(REPO, token=OWNER)
    assert verify(REPO, revision=published.commit, token=OWNER).commit == published.commit


def test_verify_takes_a_named_revision(published, online):
    repo = online.load_repo(REPO)
    repo.branches["v1"] = published.commit  # a tag is looked up alike
    online.save_repo(repo)
    online.write(REPO, {"metrics.json": b"{}"})
    assert verify(REPO, revision="v1", token=OWNER).commit == published.commit


def test_verify_of_a_repository_that_was_not_pushed_by_us_says_so(online):
    online.create(REPO)
    with pytest.raises(InputError, match=rf"^{REPO}: no manifest\.json"):
        verify(REPO, token=OWNER)


def test_a_folder_of_the_repositorys_name_does_not_stand_in_for_what_was_pushed(
    uploading, run_folder, tmp_path, monkeypatch
):
    (tmp_path / REPO).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    pushed = push(run_folder, REPO, token=OWNER)
    assert pushed.verification.commit == pushed.commit == uploading.head(REPO)


@pytest.mark.parametrize("card", [b"---\nlicense: [x\n---\n", b"\xff\xfe", b"# no metadata\n"])
def test_verify_names_a_repository_whose_card_was_broken_since(published, online, card):
    online.write(REPO, {"README.md": card})
    with pytest.raises(InputError, match=rf"^{REPO}: README\.md") as failure:
        verify(REPO, token=OWNER)
    assert "\n" not in str(failure.value)


@pytest.mark.usefixtures("hub")
def test_a_fresh_process_that_the_system_ends_is_the_environments_fault(run_folder, monkeypatch):
    folder = stage(run_folder, run_folder / "hub")
    ended = subprocess.CompletedProcess([], returncode=-9, stdout="", stderr="Loading weights\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **keywords: ended)
    with pytest.raises(EnvironmentFault, match="ended by signal 9"):
        verify(folder)


@pytest.mark.usefixtures("uploading")
def test_verify_compares_a_re_evaluation_with_the_card(run_folder):
    folder = stage(run_folder, run_folder / "hub")
    assert verify(folder, evaluate=lambda model_folder: 293 / 360).measured_accuracy == 293 / 360
    with pytest.raises(InputError, match=r"card states an accuracy of 0\.8139, measured 0\.9000"):
        verify(folder, evaluate=lambda model_folder: 0.9)


@pytest.mark.e2e
def test_verify_finds_code_that_does_not_load_without_the_package(run_folder):
    folder = stage(run_folder, run_folder / "hub")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["embeddings_vit_scratch.py"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "embeddings_vit_scratch.py").unlink()
    with pytest.raises(InputError, match=r"does not load in a fresh process.*embeddings_vit_scratch"):
        verify(folder)


@pytest.mark.e2e
def test_verify_finds_weights_that_give_other_logits(run_folder):
    folder = stage(run_folder, run_folder / "hub")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][3] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    with pytest.raises(InputError, match=r"logits differ .* by up to 0\.5 .* class 3"):
        verify(folder)
