"""A full disk at the start and at the end of a run: exit code 3, nothing half-written, and resume completes it."""

from pathlib import Path

import pytest
from fixtures_data import write_image
from fixtures_training import call, files_below, flags, pretrain_flags, pretrained, short_run
from safetensors.torch import load_file

from modeling_vit_scratch import ViTScratchForImageClassification
from training import checkpoints


def full_device() -> Path:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    return Path("/dev/full")


LAST_FILES = [
    "metrics.json",
    "environment.json",
    "trainer_state.json",
    "predictions.parquet",
    "figures/confusion_matrix.png",
    "figures/attention_rollout.png",
    "figures/learning_curves.png",
]


def no_space_for(path: Path) -> None:
    """Files of a run folder are written under this name first, so the writing process meets a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / f".{path.name}.incomplete").symlink_to(full_device())


@pytest.mark.e2e
@pytest.mark.parametrize("name", LAST_FILES)
def test_no_space_for_a_last_file_ends_with_3_and_can_be_resumed(tmp_path, name):
    folder = tmp_path / "run"
    argv = pretrain_flags(folder, classes=list("012"), test_fraction=0.1, max_steps=2)
    no_space_for(folder / name)
    outcome = call(*argv)
    assert outcome.code == 3, outcome.err
    assert str(folder / name) in outcome.error_line and "No space left on device" in outcome.error_line
    left = files_below(folder)
    assert name not in left and not [path for path in left if "incomplete" in path or "unfinished" in path]
    assert "metrics.json" not in left  # written last: where it is, the run is whole
    checkpoints.verify_checkpoint(folder / "checkpoint-2")
    assert call(*argv, "--resume").code == 0
    assert set(LAST_FILES) <= set(files_below(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "preprocessor_config.json"])
def test_no_space_for_the_final_model_ends_with_3_and_can_be_resumed(tmp_path, monkeypatch, name):
    save = ViTScratchForImageClassification.save_pretrained
    device = full_device()

    def save_to_full_disk(self, folder, *args, **kwargs):
        if Path(folder).name == "unfinished-export":
            Path(folder).mkdir()
            # safetensors writes to another name first; a folder in its place stops the renaming
            (Path(folder) / name).mkdir() if name == "model.safetensors" else (Path(folder) / name).symlink_to(device)
        save(self, folder, *args, **kwargs)

    folder = tmp_path / "run"
    monkeypatch.setattr(ViTScratchForImageClassification, "save_pretrained", save_to_full_disk)
    outcome = call(*pretrain_flags(folder))
    assert outcome.code == 3, outcome.err
    assert "unfinished-export" in outcome.error_line and "use --resume" in outcome.error_line
    left = {path.name for path in folder.iterdir()}
    assert not left & {"config.json", "model.safetensors", "preprocessor_config.json", "unfinished-export"}
    monkeypatch.undo()
    assert call(*pretrain_flags(folder), "--resume").code == 0
    assert load_file(folder / "model.safetensors").keys() == load_file(short_run() / "model.safetensors").keys()


@pytest.mark.parametrize("name", ["recipe.yaml", "data.json"])
def test_no_space_at_the_start_leaves_nothing(tmp_path, name):
    no_space_for(tmp_path / "run" / name)
    outcome = call(*pretrain_flags(tmp_path / "run"))
    assert outcome.code == 3
    assert name in outcome.error_line
    assert files_below(tmp_path / "run") == []


def test_no_space_for_an_evaluation_or_a_prediction_ends_with_3(tmp_path):
    no_space_for(tmp_path / "evaluation" / "predictions.parquet")
    data = flags(dataset_name="digits", test_fraction=0.2, dataloader_num_workers=0, classes=list("01234"))
    model = flags(model_name_or_path=pretrained(), output_dir=tmp_path / "evaluation")
    outcome = call("evaluate", *model, *data)
    assert outcome.code == 3 and "predictions.parquet" in outcome.error_line
    no_space_for(tmp_path / "out.csv")
    outcome = call("predict", pretrained(), write_image(tmp_path / "a.png"), "--output", tmp_path / "out.csv")
    assert outcome.code == 3 and "out.csv" in outcome.error_line
    assert [name for name in files_below(tmp_path) if "incomplete" in name] == []
