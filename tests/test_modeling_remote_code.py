"""The files of modeling_vit_scratch as remote code: copied one by one, found by a regular expression, run alone."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures_modeling import random_pixels, tiny_classifier
from transformers.dynamic_module_utils import get_relative_imports

import modeling_vit_scratch

PACKAGE = Path(modeling_vit_scratch.__file__).parent
# What is published: converters stay here, and may import more.
FILES = sorted(
    path for path in PACKAGE.glob("*.py") if path.name != "__init__.py" and not path.name.startswith("convert_")
)

THIRD_PARTY = {"torch", "torchvision", "transformers", "huggingface_hub", "PIL", "numpy"}

# From transformers, beside its top-level public names. Hub copies run on the downloader's version, where these may
# have moved: each new one is a risk to weigh, so the list is short and stands here.
PRIVATE_NAMES = {
    "transformers.initialization",
    "transformers.activations.ACT2FN",
    "transformers.modeling_outputs.BackboneOutput",
    "transformers.modeling_outputs.BaseModelOutputWithPooling",
    "transformers.modeling_outputs.ImageClassifierOutput",
    "transformers.modeling_outputs.ModelOutput",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
}
PUBLIC_NAMES = {
    "AttentionInterface",
    "AutoModelForImageClassification",
    "BackboneConfigMixin",
    "BackboneMixin",
    "BaseImageProcessor",
    "BatchFeature",
    "GradientCheckpointingLayer",
    "ImageClassificationPipeline",
    "PreTrainedConfig",
    "PreTrainedModel",
}


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """(level, module, name) of every import in the file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, node.module or "", alias.name) for alias in node.names)


def reached(path: Path) -> set[str]:
    """Names of the files that transformers copies along with this one, by its own search."""
    found, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        if current.name not in found:
            found.add(current.name)
            waiting += [PACKAGE / f"{name}.py" for name in get_relative_imports(current)]
    return found


def name_of(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_a_downloader_has(path):
    roots = {module.split(".")[0] for level, module, _ in imports(path) if level == 0}
    assert roots - THIRD_PARTY - set(sys.stdlib_module_names) == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_relative_import_names_a_file_beside_this_one(path):
    relative = {(level, module) for level, module, _ in imports(path) if level}
    assert {level for level, _ in relative} <= {1}
    assert {module for _, module in relative} <= {other.stem for other in FILES}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_text_search_of_transformers_finds_the_imports_that_python_sees(path):
    # It reads docstrings and comments as well, and overlooks imports in another form.
    assert set(get_relative_imports(path)) == {module for level, module, _ in imports(path) if level}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_has_a_name_that_an_upload_takes(path):
    assert re.fullmatch(r"[a-z][a-z0-9_]*_vit_scratch\.py", path.name)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_does_not_ask_for_the_class_of_a_config(path):
    # A folder on disk loads config and model from two copies of the module, so the answer would be no.
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    checks = [ast.unparse(call) for call in calls if ast.unparse(call.func) in ("isinstance", "issubclass", "type")]
    assert [check for check in checks if "ViTScratchConfig" in check] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_does_not_turn_its_annotations_into_strings(path):
    # Then `config: ViTScratchConfig` would make config_class a string.
    assert (0, "__future__", "annotations") not in set(imports(path))


def test_the_folder_is_flat():
    assert [path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_the_modeling_file_reaches_exactly_the_network():
    assert reached(PACKAGE / "modeling_vit_scratch.py") == {
        "class_token_vit_scratch.py",
        "configuration_vit_scratch.py",
        "embeddings_vit_scratch.py",
        "errors_vit_scratch.py",
        "initialization_vit_scratch.py",
        "loading_vit_scratch.py",
        "modeling_vit_scratch.py",
        "pooling_vit_scratch.py",
        "positions_vit_scratch.py",
        "pretrained_vit_scratch.py",
        "residual_vit_scratch.py",
        "resnet_stem_vit_scratch.py",
        "swiglu_vit_scratch.py",
        "validation_vit_scratch.py",
    }


def test_no_published_file_reaches_a_converter():
    entry_points = ("modeling", "backbone", "pretraining", "image_processing", "pipeline")
    files = set().union(*(reached(PACKAGE / f"{name}_vit_scratch.py") for name in entry_points))
    assert [name for name in files if name.startswith("convert_")] == []


def test_the_names_taken_from_transformers_are_those_listed():
    taken = {
        (module, name) for path in FILES for _, module, name in imports(path) if module.split(".")[0] == "transformers"
    }
    qualified = {f"{module}.{name}" for module, name in taken}
    assert qualified == PRIVATE_NAMES | {f"transformers.{name}" for name in PUBLIC_NAMES}


def test_the_names_called_public_are_exported_by_transformers():
    import transformers

    assert set(dir(transformers)) >= PUBLIC_NAMES


FRESH_PROCESS = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
folder, pixels = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
encoder = AutoModel.from_pretrained(folder, trust_remote_code=True, image_size=48)
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
assert "modeling_vit_scratch" not in sys.modules
assert config.hidden_size == 32 and encoder.config.image_size == 48
torch.save({"logits": model(pixels).logits.detach()}, sys.argv[3])
model.save_pretrained(sys.argv[4])
"""


@pytest.mark.e2e
def test_a_folder_with_the_code_beside_the_weights_loads_in_a_fresh_process(tmp_path):
    model, pixels = tiny_classifier(), random_pixels()
    model.config.auto_map = {
        "AutoConfig": "configuration_vit_scratch.ViTScratchConfig",
        "AutoModel": "modeling_vit_scratch.ViTScratchModel",
        "AutoModelForImageClassification": "modeling_vit_scratch.ViTScratchForImageClassification",
    }
    folder = tmp_path / "published"
    model.save_pretrained(folder)
    for name in reached(PACKAGE / "modeling_vit_scratch.py"):
        shutil.copy(PACKAGE / name, folder)
    torch.save(pixels, tmp_path / "pixels.pt")
    again = tmp_path / "again"
    subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, folder, tmp_path / "pixels.pt", tmp_path / "logits.pt", again],
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        check=True,
        timeout=240,
    )
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)["logits"]
    torch.testing.assert_close(logits, model(pixels).logits.detach(), rtol=0, atol=0)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((again / "config.json").read_text())["auto_map"].keys() == model.config.auto_map.keys()
