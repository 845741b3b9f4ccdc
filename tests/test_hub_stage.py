"""The staging folder is complete, says nothing about the machine it was made on, and is whole or absent."""

import json
import shutil

import pytest
import torch
import yaml
from hub_run_folder import CLASSES, edit_json
from safetensors.torch import load_file, save_file

from hub_upload import stage as stage_module
from hub_upload.manifest import verify_manifest
from hub_upload.run_facts import read_run_facts
from hub_upload.stage import stage
from hub_upload.verify import load_in_fresh_process
from modeling_vit_scratch.errors_vit_scratch import EnvironmentFault, InputError

pytest_plugins = ["fixtures_hub"]


@pytest.fixture
def staged(run_folder):
    return stage(run_folder, run_folder / "hub", repo_id="alice/digits")


def test_auto_map_names_every_class_without_a_repository(staged):
    config = json.loads((staged / "config.json").read_text())
    processor = json.loads((staged / "preprocessor_config.json").read_text())
    assert config["auto_map"] == {
        "AutoBackbone": "backbone_vit_scratch.ViTScratchBackbone",
        "AutoConfig": "configuration_vit_scratch.ViTScratchConfig",
        "AutoModel": "modeling_vit_scratch.ViTScratchModel",
        "AutoModelForImageClassification": "modeling_vit_scratch.ViTScratchForImageClassification",
        "AutoModelForMaskedImageModeling": "pretraining_vit_scratch.ViTScratchForMaskedPatchPrediction",
        "AutoModelForPreTraining": "pretraining_vit_scratch.ViTScratchForMaskedAutoencoding",
    }
    assert processor["auto_map"] == {"AutoImageProcessor": "image_processing_vit_scratch.ViTScratchImageProcessor"}


def test_every_class_that_a_config_names_stands_in_a_staged_file(staged):
    config = json.loads((staged / "config.json").read_text())
    processor = json.loads((staged / "preprocessor_config.json").read_text())
    named = [*config["auto_map"].values(), *processor["auto_map"].values()]
    named += [task["impl"] for task in config["custom_pipelines"].values()]
    for module, _, name in (reference.partition(".") for reference in named):
        assert f"class {name}(" in (staged / f"{module}.py").read_text()


def test_an_auto_map_that_points_to_another_repository_is_replaced(run_folder):
    edit_json(run_folder / "config.json", auto_map={"AutoModel": "bob/base--modeling_vit_scratch.ViTScratchModel"})
    folder = stage(run_folder, run_folder / "hub")
    assert "bob" not in (folder / "config.json").read_text()


def test_the_weights_are_the_run_folders_bytes(staged, run_folder):
    assert (staged / "model.safetensors").read_bytes() == (run_folder / "model.safetensors").read_bytes()


def test_nothing_pickled_and_no_training_state_is_staged(run_folder):
    for name in ("training_args.bin", "pytorch_model.bin", "trainer_state.json", "predictions.parquet"):
        (run_folder / name).write_bytes(b"x")
    names = {path.name for path in stage(run_folder, run_folder / "hub").rglob("*")}
    assert not names & {"training_args.bin", "pytorch_model.bin", "trainer_state.json", "predictions.parquet"}


def test_the_manifest_covers_every_file_but_card_and_itself(staged):
    files = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
    assert set(verify_manifest(staged)["files"]) == files - {"README.md", "manifest.json"}


def test_staging_twice_gives_the_same_bytes(staged, run_folder):
    again = stage(run_folder, run_folder / "hub2", repo_id="alice/digits")
    for path in staged.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (again / path.relative_to(staged)).read_bytes(), path.name


@pytest.mark.parametrize(
    ("field", "value", "published"),
    [
        ("output_dir", "/home/somebody/runs/digits", "digits"),
        ("data_dir", "../flowers", "flowers"),
        ("model_name_or_path", "C:\\runs\\pretrained", "pretrained"),
        ("dataset_name", "org/pets", "org/pets"),
        ("learning_rate", 0.001, 0.001),
    ],
)
def test_the_recipe_keeps_settings_and_drops_folders(run_folder, field, value, published):
    recipe = {**yaml.safe_load((run_folder / "recipe.yaml").read_text()), field: value}
    (run_folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    folder = stage(run_folder, run_folder / "hub")
    assert yaml.safe_load((folder / "recipe.yaml").read_text())[field] == published


def test_a_class_called_no_stays_no_and_notes_of_a_resume_lose_their_paths(run_folder):
    text = "# changed at checkpoint-5: data_dir: /home/me/old -> /home/me/new\nverb: pretrain\nclasses: [no, 1e-3]\n"
    (run_folder / "recipe.yaml").write_text(text)
    published = (stage(run_folder, run_folder / "hub") / "recipe.yaml").read_text()
    assert published == text.replace("/home/me/", "")


def test_no_file_names_the_folder_of_the_run(staged, run_folder):
    for path in staged.rglob("*"):
        if path.is_file():
            assert str(run_folder).encode() not in path.read_bytes(), path.name


def test_a_new_staging_replaces_the_old_one_whole(staged, run_folder):
    (staged / "left_over.py").write_text("")
    stage(run_folder, staged, repo_id="alice/digits")
    assert not (staged / "left_over.py").exists()
    assert not [path for path in run_folder.iterdir() if path.name.startswith(".")]


def test_a_folder_that_is_not_ours_is_left_alone(run_folder, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("x")
    with pytest.raises(InputError, match="no staging folder"):
        stage(run_folder, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "x"


def test_a_full_disk_leaves_nothing_and_keeps_the_old_folder(staged, run_folder, monkeypatch):
    before = (staged / "manifest.json").read_bytes()

    def full_disk(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage_module, "write_manifest", full_disk)
    with pytest.raises(EnvironmentFault, match="No space left"):
        stage(run_folder, staged)
    assert (staged / "manifest.json").read_bytes() == before
    assert not [path for path in run_folder.iterdir() if path.name.startswith(".")]


REQUIRED = [
    "config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "recipe.yaml",
    "metrics.json",
    "data.json",
    "environment.json",
    "figures/confusion_matrix.png",
]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_file_is_named(run_folder, name):
    (run_folder / name).unlink()
    with pytest.raises(InputError, match=name):
        stage(run_folder, run_folder / "hub")
    assert not (run_folder / "hub").exists()


@pytest.mark.parametrize("name", REQUIRED)
def test_a_truncated_file_is_named(run_folder, name):
    content = (run_folder / name).read_bytes()
    # A YAML file cut at a line's end is whole: its last half-line is made one that is not.
    (run_folder / name).write_bytes(content[: len(content) // 2] + (b"\n: [" if name.endswith(".yaml") else b""))
    with pytest.raises(InputError, match=name):
        stage(run_folder, run_folder / "hub")
    assert not (run_folder / "hub").exists()


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_without_the_classifier_are_refused(run_folder):
    edit_weights(run_folder, lambda weights: weights.pop("classifier.weight"))
    with pytest.raises(InputError, match=r"classifier\.weight"):
        stage(run_folder, run_folder / "hub")


def test_weights_of_another_shape_are_refused(run_folder):
    edit_weights(run_folder, lambda weights: weights.update({"classifier.weight": torch.zeros(7, 32)}))
    with pytest.raises(InputError, match="classifier"):
        stage(run_folder, run_folder / "hub")


def test_a_weight_that_the_model_has_no_place_for_is_refused(run_folder):
    edit_weights(run_folder, lambda weights: weights.update({"vit.extra": torch.zeros(2)}))
    with pytest.raises(InputError, match=r"vit\.extra"):
        stage(run_folder, run_folder / "hub")


def test_nan_in_the_weights_is_refused_by_name(run_folder):
    edit_weights(run_folder, lambda weights: weights["classifier.bias"].fill_(torch.nan))
    with pytest.raises(InputError, match=r"NaN or infinity in classifier\.bias"):
        stage(run_folder, run_folder / "hub")


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("config.json", {"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ("config.json", {"id2label": dict.fromkeys("0123456789", "cat")}, "label2id"),
        ("config.json", {"label2id": {name: str(index) for index, name in enumerate(CLASSES)}}, "label2id"),
        ("config.json", {"hidden_sise": 32}, "hidden_sise"),
        ("config.json", {"model_type": "vit"}, "model_type"),
        ("config.json", {"architectures": ["ViTScratchModel"]}, "architectures"),
        ("data.json", {"class_names": CLASSES[::-1]}, "two runs"),
        ("metrics.json", {"schema_version": 2}, "schema_version=2"),
        ("metrics.json", {"evaluation__accuracy__value": 0.99}, r"accuracy\.value"),
        ("metrics.json", {"evaluation__num_samples": 10}, "confusion_matrix"),
        ("metrics.json", {"evaluation__split": "validation"}, "split"),
        ("metrics.json", {"evaluation": None}, "was not evaluated"),
        ("metrics.json", {"evaluation__accuracy": None}, "is missing or of another kind"),
    ],
)
def test_files_that_contradict_each_other_are_refused(run_folder, name, fields, said):
    edit_json(run_folder / name, **fields)
    with pytest.raises(InputError, match=said):
        stage(run_folder, run_folder / "hub")


def test_a_run_without_evaluation_is_told_what_it_lacks(run_folder):
    # As training leaves it: no predictions, so no pictures of them either.
    edit_json(run_folder / "metrics.json", evaluation=None)
    for name in ("confusion_matrix", "attention_rollout"):
        (run_folder / "figures" / f"{name}.png").unlink()
    with pytest.raises(InputError, match=r"was not evaluated.*test split"):
        stage(run_folder, run_folder / "hub")


@pytest.mark.e2e
def test_twelve_classes_in_the_order_of_transformers_files_are_staged_and_load(run_folder):
    names = [f"class {index}" for index in range(12)]
    id2label = {key: names[int(key)] for key in sorted(map(str, range(12)))}  # 0, 1, 10, 11, 2, ...
    edit_json(run_folder / "config.json", id2label=id2label, label2id={n: i for i, n in enumerate(names)})
    edit_json(run_folder / "data.json", class_names=names)
    rows = [{"label": name, "num_samples": 30, "precision": 1.0, "recall": 1.0, "f1": 1.0} for name in names]
    accuracy = {"value": 1.0, "low": 0.9, "high": 1.0, "confidence": 0.95, "interval": "wilson", "num_correct": 360}
    edit_json(
        run_folder / "metrics.json",
        evaluation__per_class=rows,
        evaluation__confusion_matrix=[[30 * (row == column) for column in range(12)] for row in range(12)],
        evaluation__accuracy=accuracy,
    )
    head = {"classifier.weight": torch.randn(12, 32), "classifier.bias": torch.randn(12)}
    edit_weights(run_folder, lambda weights: weights.update(head))
    assert read_run_facts(run_folder).class_names == names
    folder = stage(run_folder, run_folder / "hub")
    assert load_in_fresh_process(folder, folder / "golden.safetensors")["num_classes"] == 12


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match="no such run folder"):
        stage(tmp_path / "nowhere", tmp_path / "hub")


def test_the_staging_folder_may_move(staged, tmp_path):
    moved = shutil.move(staged, tmp_path / "elsewhere")
    verify_manifest(moved)
