"""A run folder goes to a Hub through the real client and comes back for others; no failure harms what was there.

The faults run in this process; the whole path and the loads run in processes of their own, as users run them.
"""

import importlib
import json
import re

import numpy as np
import pytest
import torch
import yaml
from hub_client import run_online
from hub_run_folder import edit_json
from hub_server import OTHER, OWNER, READER
from huggingface_hub import HfApi
from PIL import Image
from safetensors.torch import load_file, save_file

from hub_upload.manifest import verify_manifest
from hub_upload.push import push
from hub_upload.stage import stage
from hub_upload.verify import verify
from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

pytest_plugins = ["fixtures_hub"]
hub_errors, push_module = (importlib.import_module(f"hub_upload.{name}") for name in ("hub_errors", "push"))
REPO = "alice/digits"
UPLOADS = r"/commit/|preupload|/lfs"


def num_uploads(hub):
    return hub.num_requests("POST", UPLOADS) + hub.num_requests("PUT", UPLOADS)


# The whole path

PUSH = """
from hub_upload.push import push
result = push({folder!r}, "alice/digits")
print(result.commit, result.verification.fresh_load["max_logit_difference"])
"""

LOAD = """
import json, sys
from PIL import Image
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline
remote = dict(trust_remote_code=True)
config = AutoConfig.from_pretrained("alice/digits", **remote)
model = AutoModelForImageClassification.from_pretrained("alice/digits", **remote)
body = AutoModel.from_pretrained("alice/digits", **remote)
processor = AutoImageProcessor.from_pretrained("alice/digits", **remote)
image = Image.open({image!r})
with torch.no_grad():
    logits = model(**processor(image, return_tensors="pt")).logits[0]
answer = pipeline("image-classification", model="alice/digits", **remote)(image, top_k=1)[0]
assert isinstance(model.config, type(config)) and "modeling_vit_scratch" not in sys.modules
print(json.dumps(dict(logits=logits.tolist(), answer=answer, hidden=body.config.hidden_size)))
"""


@pytest.mark.e2e
def test_a_push_is_verified_and_loads_by_its_id_for_a_stranger(hub, run_folder, tmp_path):
    done = run_online(PUSH.format(folder=str(run_folder)), hub, tmp_path / "a", OWNER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [hub.head(REPO), "0.0"]

    picture = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(picture)
    done = run_online(LOAD.format(image=str(picture)), hub, tmp_path / "b")
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded["logits"] == pytest.approx(logits_here(run_folder, picture), abs=1e-5)
    assert loaded["answer"]["label"] == str(int(np.argmax(loaded["logits"])))


@pytest.mark.e2e
def test_a_private_repository_loads_with_its_owners_token_only(uploading, run_folder, tmp_path):
    push(run_folder, REPO, private=True, token=OWNER)
    Image.new("RGB", (20, 30), (200, 10, 10)).save(tmp_path / "photo.png")
    done = run_online(LOAD.format(image=str(tmp_path / "photo.png")), uploading, tmp_path / "home", READER)
    assert done.returncode == 0, done.stderr
    for token in (OTHER, None):
        with pytest.raises(InputError, match="no such repository, or a private one"):
            verify(REPO, token=token)


def logits_here(run_folder, picture):
    from modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchImageProcessor

    processor = ViTScratchImageProcessor.from_pretrained(run_folder)
    with torch.no_grad():
        model = ViTScratchForImageClassification.from_pretrained(run_folder)
        return model(**processor(Image.open(picture), return_tensors="pt")).logits[0].tolist()


@pytest.mark.e2e
def test_the_snippets_of_the_card_run_as_they_stand(published, online, tmp_path):
    (tmp_path / "home").mkdir()
    Image.new("RGB", (20, 30), (200, 10, 10)).save(tmp_path / "home" / "photo.png")
    snippets = re.findall(r"```python\n(.*?)```", online.content(REPO, "README.md").decode(), re.DOTALL)
    auto_classes, pipeline, package = snippets
    for snippet in (auto_classes + pipeline, package):
        done = run_online(snippet, online, tmp_path / "home")
        assert done.returncode == 0, done.stderr


STOCK_PIPELINE = """
import json
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, ImageClassificationPipeline, pipeline
remote = dict(trust_remote_code=True)
model = AutoModelForImageClassification.from_pretrained({folder!r}, **remote)
processor = AutoImageProcessor.from_pretrained({folder!r}, **remote)
stock = ImageClassificationPipeline(model=model, image_processor=processor)
ours = pipeline("image-classification", model={folder!r}, **remote)
opaque = Image.linear_gradient("L").convert("RGB")
sheer = opaque.copy()
sheer.putalpha(Image.linear_gradient("L").rotate(90))
def scores(classify, image):
    return sorted((answer["label"], answer["score"]) for answer in classify(image, top_k=10))
print(json.dumps([[scores(stock, image), scores(ours, image)] for image in (opaque, sheer)]))
"""


@pytest.mark.e2e
def test_the_stock_pipeline_differs_where_the_card_says_so(run_folder, hub, tmp_path):
    folder = stage(run_folder, run_folder / "hub")
    done = run_online(STOCK_PIPELINE.format(folder=str(folder)), hub, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    opaque, sheer = json.loads(done.stdout.splitlines()[-1])
    assert opaque[0] == opaque[1] and sheer[0] != sheer[1]


def test_a_push_is_one_commit_that_holds_all_of_the_staging_folder(published, online):
    repo = online.load_repo(REPO)
    commit = repo.commits[published.commit]
    staged = {path.relative_to(published.folder).as_posix() for path in published.folder.rglob("*") if path.is_file()}
    assert len(repo.commits) == 2 and set(commit.files) == staged | {".gitattributes"}
    assert published.url == f"{online.url}/{REPO}/tree/{published.commit}"


def test_a_second_push_of_the_same_run_makes_no_commit(published, online, run_folder):
    assert push(run_folder, REPO, token=OWNER).commit == published.commit
    assert len(online.load_repo(REPO).commits) == 2


def test_a_push_takes_back_its_own_stale_files_and_leaves_those_of_others(published, online, run_folder):
    manifest = json.loads(online.content(REPO, "manifest.json"))
    manifest["files"]["old_vit_scratch.py"] = {"size": 1, "sha256": "0" * 64}
    stale = {"manifest.json": json.dumps(manifest).encode(), "old_vit_scratch.py": b"x"}
    online.write(REPO, {**stale, "notes.txt": b"mine", "README.md": b"# Mine\n"})
    push(run_folder, REPO, token=OWNER)
    assert "old_vit_scratch.py" not in online.paths(REPO)
    assert online.content(REPO, "notes.txt") == b"mine"


def test_a_hand_written_card_is_merged_and_a_second_push_changes_nothing(uploading, run_folder):
    online = uploading
    online.create(REPO)
    online.write(REPO, {"README.md": b"---\nlicense: mit\nlanguage: no\n---\n\n# Mine\n\nMy words.\n"})
    first = push(run_folder, REPO, token=OWNER)
    card = online.content(REPO, "README.md").decode()
    assert "license: mit\nlanguage: no\n" in card and "# Mine\n\nMy words.\n" in card and "81.39 %" in card
    assert push(run_folder, REPO, token=OWNER).commit == first.commit


def test_a_base_model_is_named_only_where_the_hub_has_it(uploading, run_folder):
    online = uploading
    online.create("bob/base")
    recipe = {**yaml.safe_load((run_folder / "recipe.yaml").read_text()), "verb": "finetune"}
    for start in ("bob/base", "runs/pretrained"):
        (run_folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "model_name_or_path": start}))
        push(run_folder, REPO, token=OWNER)
        metadata = yaml.safe_load(online.content(REPO, "README.md").decode().split("---\n")[1])
        assert metadata.get("base_model") == ("bob/base" if start == "bob/base" else None)


def test_results_on_a_benchmark_go_to_eval_results_under_its_own_task(uploading, run_folder):
    online = uploading
    tasks = yaml.safe_dump({"name": "Pets", "tasks": [{"id": "pets-test", "config": "default", "split": "test"}]})
    online.create("org/pets", prefix="datasets/")
    revision = online.write("datasets/org/pets", {"eval.yaml": tasks.encode()})
    edit_json(run_folder / "data.json", kind="hub", dataset="org/pets", revision=revision)
    edit_json(run_folder / "data.json", splits__test__origin="given")
    push(run_folder, REPO, token=OWNER)
    (entry,) = yaml.safe_load(online.content(REPO, ".eval_results/digits.yaml"))
    assert entry["dataset"] == {"id": "org/pets", "task_id": "pets-test", "revision": revision}
    assert entry["value"] == pytest.approx(293 / 360)


def test_digits_claim_no_benchmark(published, online):
    assert not [path for path in online.paths(REPO) if path.startswith(".eval_results")]


@pytest.mark.e2e
def test_a_dry_run_stages_and_loads_but_asks_the_hub_nothing(hub, run_folder):
    result = push(run_folder, REPO, dry_run=True)
    verify_manifest(result.folder)
    assert (result.commit, hub.requests) == (None, [])


# Refused before any byte is sent


@pytest.mark.parametrize(
    ("repo_id", "token", "said"),
    [
        (REPO, "nonsense", "the token is not valid"),
        (REPO, READER, "read-only"),
        ("bob/digits", OWNER, "may not create a repository for bob"),
        ("alice/dig its", OWNER, "is not a name the Hub takes"),
        ("a/b/c", OWNER, "is not a name the Hub takes"),
        ("alice/public", OTHER, "may not write there"),
        ("alice/secret", OTHER, "may not create a repository for alice"),
    ],
)
def test_a_wrong_name_or_token_is_refused_before_any_upload(online, run_folder, repo_id, token, said):
    online.create("alice/public")
    online.create("alice/secret", private=True)
    heads = online.head("alice/public"), online.head("alice/secret")
    with pytest.raises(InputError, match=said) as failure:
        push(run_folder, repo_id, token=token)
    assert "\n" not in str(failure.value) and num_uploads(online) == 0
    assert (online.head("alice/public"), online.head("alice/secret")) == heads
    assert not (run_folder / "hub").exists()


def test_a_push_without_a_token_says_how_to_log_in(online, run_folder):
    with pytest.raises(InputError, match="hf auth login"):
        push(run_folder, REPO)
    assert online.requests == []


def test_a_private_push_to_a_public_repository_is_refused(online, run_folder):
    online.create(REPO)
    with pytest.raises(InputError, match="exists and is public"):
        push(run_folder, REPO, private=True, token=OWNER)
    assert num_uploads(online) == 0


def test_offline_mode_is_named_as_the_reason(hub, run_folder):
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        push(run_folder, REPO, token=OWNER)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "figures/learning_curves.png"])
def test_a_run_folder_that_lacks_a_file_is_refused_before_any_request(online, run_folder, name):
    (run_folder / name).unlink()
    with pytest.raises(InputError, match=name):
        push(run_folder, REPO, token=OWNER)
    assert online.requests == []


def test_broken_weights_are_refused_before_any_upload(online, run_folder):
    weights = load_file(run_folder / "model.safetensors")
    weights["classifier.bias"][0] = torch.nan
    save_file(weights, run_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="NaN"):
        push(run_folder, REPO, token=OWNER)
    assert num_uploads(online) == 0 and not online.exists(REPO)


def test_a_foreign_manifest_is_not_overwritten(online, run_folder):
    online.create(REPO)
    online.write(REPO, {"manifest.json": b'{"name": "my web app"}'})
    with pytest.raises(InputError, match=r"manifest\.json was not written by a push"):
        push(run_folder, REPO, token=OWNER)
    assert online.content(REPO, "manifest.json") == b'{"name": "my web app"}'


def test_a_server_that_is_not_there_is_the_environments_fault(online, run_folder):
    online.stop()
    with pytest.raises(EnvironmentFault, match="could not be reached") as failure:
        push(run_folder, REPO, token=OWNER)
    assert "\n" not in str(failure.value)


def test_a_server_that_does_not_answer_is_given_up(online, run_folder, monkeypatch):
    monkeypatch.setattr(hub_errors, "REQUEST_TIMEOUT_SECONDS", 0.2)
    online.faults.stall_seconds = 1.0
    with pytest.raises(EnvironmentFault, match="could not be reached"):
        push(run_folder, REPO, token=OWNER)


# Failures in mid-upload


def failing_push(run_folder):
    with pytest.raises((InputError, EnvironmentFault)) as failure:
        push(run_folder, REPO, token=OWNER)
    assert "\n" not in str(failure.value)
    return failure.value


@pytest.mark.parametrize("lfs_put_from", [1, 2, 5])
def test_a_server_error_in_mid_upload_leaves_the_revision_as_it_was(uploading, run_folder, lfs_put_from):
    uploading.create(REPO)
    head = uploading.write(REPO, {"model.safetensors": b"the model before"})
    uploading.faults.lfs_put_from = lfs_put_from
    fault = failing_push(run_folder)
    assert isinstance(fault, EnvironmentFault)
    assert f"the repository is as it was, at {head}" in str(fault) and "500" in str(fault)
    assert uploading.head(REPO) == head and uploading.content(REPO, "model.safetensors") == b"the model before"


@pytest.mark.parametrize(
    ("status", "kind"), [(500, EnvironmentFault), (503, EnvironmentFault), (412, EnvironmentFault), (413, InputError)]
)
def test_a_refused_commit_leaves_the_revision_as_it_was(uploading, run_folder, status, kind):
    uploading.create(REPO)
    head = uploading.head(REPO)
    uploading.faults.commit_status = status
    fault = failing_push(run_folder)
    assert type(fault) is kind and "the repository is as it was" in str(fault) and uploading.head(REPO) == head


def test_a_new_repository_left_empty_is_named(uploading, run_folder):
    uploading.faults.commit_status = 500
    assert f"the new repository {REPO} is empty and stays" in str(failing_push(run_folder))
    assert uploading.paths(REPO) == {".gitattributes"}


def test_a_commit_whose_answer_was_lost_is_not_called_undone(uploading, run_folder):
    uploading.create(REPO)
    uploading.faults.lose_commit_answer = True
    fault = failing_push(run_folder)
    assert f"it holds a newer commit, {uploading.head(REPO)}" in str(fault)


def test_a_server_that_goes_away_in_mid_upload_is_told_as_unknown(uploading, run_folder, monkeypatch):
    uploading.create(REPO)
    head = uploading.head(REPO)
    upload = HfApi.preupload_lfs_files

    def last_upload(*arguments, **keywords):
        upload(*arguments, **keywords)
        uploading.stop()

    monkeypatch.setattr(HfApi, "preupload_lfs_files", last_upload)
    assert "its state could not be read" in str(failing_push(run_folder))
    assert uploading.head(REPO) == head


def test_a_commit_that_somebody_else_makes_meanwhile_is_not_overwritten(uploading, run_folder, monkeypatch):
    uploading.create(REPO)

    def slow_stage(*arguments, **keywords):
        uploading.write(REPO, {"notes.txt": b"meanwhile"})
        return stage(*arguments, **keywords)

    monkeypatch.setattr(push_module, "stage", slow_stage)
    fault = failing_push(run_folder)
    assert isinstance(fault, EnvironmentFault) and "somebody else changed the repository" in str(fault)
    assert uploading.paths(REPO) == {".gitattributes", "notes.txt"}


def test_the_push_after_a_failed_one_succeeds(uploading, run_folder):
    uploading.faults.lfs_put_from = 3
    failing_push(run_folder)
    uploading.faults.lfs_put_from = None
    assert push(run_folder, REPO, token=OWNER).commit == uploading.head(REPO)
