"""The built wheel runs from anywhere, also from a folder that holds a `training/` of somebody else's."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder into which the wheel is installed, apart from the checkout."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", target, wheel]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.fixture
def foreign_folder(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").write_text("raise RuntimeError('the foreign package was imported')")
    return tmp_path


def run(installed: Path, folder: Path, *command: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel):
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "modeling_vit_scratch",
        "training",
        "hub_upload",
    }


def test_the_wheel_holds_recipes_and_templates(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("training/recipes", "hub_upload/templates"):
        shipped = {f"{folder}/{path.name}" for path in (ROOT / folder).iterdir() if path.is_file()}
        assert shipped and shipped <= set(names)


FIRST_STEPS = ["--config", "demo_pretrain", "--num_train_epochs", "none", "--max_steps", "3", "--output_dir", "run"]


@pytest.mark.parametrize("how", ["console script", "module", "file"])
def test_the_demo_begins_from_a_folder_with_a_foreign_training_package(installed, foreign_folder, how):
    start = {
        "console script": [installed / "bin" / "vit-scratch", "pretrain"],
        "module": ["-P", "-m", "training.pretrain"],
        "file": [installed / "training" / "pretrain.py"],
    }[how]
    done = run(installed, foreign_folder, *start, *FIRST_STEPS)
    assert done.returncode == 0, done.stderr
    assert (foreign_folder / "run" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["cli", "demo", "pretrain", "finetune", "evaluation", "prediction", "publishing"])
def test_every_entry_point_runs_as_a_module_and_as_a_file(installed, tmp_path, name):
    as_module = run(installed, tmp_path, "-P", "-m", f"training.{name}", "--help")
    as_file = run(installed, tmp_path, installed / "training" / f"{name}.py", "--help")
    assert (as_module.returncode, as_file.returncode) == (0, 0), as_module.stderr + as_file.stderr
    assert "usage:" in as_module.stdout and as_module.stdout == as_file.stdout


def test_what_runs_is_the_wheel(installed, tmp_path):
    done = run(installed, tmp_path, "-P", "-c", "import training; print(training.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(installed)
