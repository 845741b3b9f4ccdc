"""The common tests of the installed transformers, from its source distribution, on our classes.

They also run on transformers' own ViT, DINOv2 backbone and ViT image processor. Every test that those pass must pass
here, but for the few in CANNOT_APPLY; nothing else may be skipped that those do not skip.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import transformers

REPO = Path(__file__).parent.parent
SUITE = Path(__file__).parent / "peer_suite"

# Our classes: transformers' class that they are compared with.
PEERS = {
    "ViTScratchModelTest": "ViTModelTest",
    "MaskedAutoencodingTest": "ViTModelTest",
    "MaskedPatchPredictionTrainingTest": "ViTModelTest",
    "HybridTest": "ViTModelTest",
    "ModernTest": "ViTModelTest",
    "ViTScratchBackboneTest": "Dinov2BackboneTest",
    "ViTScratchImageProcessorTest": "ViTImageProcessorTest",
}

# What transformers' own models pass and ours skip: the feature that is tested is not there, on purpose.
CANNOT_APPLY = {
    "test_can_capture_specific_layers_hidden_states": "outputs are gathered by a plain loop, not a private decorator",
    "test_capture_outputs_decorator": "outputs are gathered by a plain loop, not a private decorator",
    "test_can_load_from_already_mapped_keys": "checkpoints are stored under our names: nothing is renamed on loading",
    "test_reverse_loading_mapping": "checkpoints are stored under our names: nothing is renamed on loading",
    "test_fast_image_processor_explicit_none_preserved": "there is no do_resize, do_rescale or do_normalize to unset",
    "test_backends_equivalence": "there is one backend, so that training and evaluation see the same pixels",
    "test_backends_equivalence_batched": "there is one backend",
    "test_save_load_backends": "there is one backend",
    "test_save_load_backends_auto": "there is one backend",
    "test_pil_can_run_without_torchvision": "there is one backend, and it is torchvision's",
}
# Why transformers' own models skip what both skip, in the mixins' words.
SHARED_REASONS = {
    "needs what is not installed or not in this machine": (
        "test requires (multiple )?accelerators?|test requires MPS|test requires deepspeed|test requires the kernels.*"
        "|test requires Flash Attention.*"
    ),
    "is for text, speech or several models in one": (
        "No decoder-only language.*|No sequence-to-sequence.*|Do not take a cache.*|.*inputs_embeds.*|.*composite.*"
        "|No subconfigs.*|test_resize_embeddings is set to .False.|.*sliding window.*|.*no sparse experts.*"
        "|.*output_router_logits.*|.* does not support SDPA|.* does not support grouped_mm"
    ),
    "is for an option that neither has": (
        ".*_keep_in_fp32_modules.*|.*RoPE.*|Model does not have a TP plan.|No validation found for .preprocess. method"
        "|Model does not have position embeddings|.*no .base_model_class. defined.*"
    ),
    "cannot be told apart by the mixin": "No model with a differentiable loss was available.*",
}
# Tests that our suite defines in the place of transformers'.
OVERRIDDEN = {
    "test_config": "each model calls the ConfigTester for itself",
    "test_training_overfit": "the mixin has batches of text only; ViT runs with the same batch of images",
    "test_model_get_set_embeddings": "the mixin expects word embeddings; ViT overrides it too",
    "test_model_outputs_equivalence": "the mixin subtracts outputs, which torch does not do for a mask of booleans",
    "test_model_weights_reload_no_missing_tied_weights": "a file without the encoder's weights is refused",
    "test_problem_types": "theirs asks for regression too, which the configuration refuses",
    "test_sdpa_can_dispatch_non_composite_models": "without a name the kernel is chosen by a rule, not always sdpa",
    "test_call_numpy_4_channels": "there is no do_convert_rgb: such a field is refused",
    "test_image_processor_from_dict_with_kwargs_has_attributes": "there is no do_convert_rgb: such a field is refused",
}
# transformers' own ViT does not pass it as the mixin has it.
FAILED_BY_VIT = {"test_model_get_set_embeddings"}

# Modules that the common tests import and the source distribution leaves out.
STUBS = {
    "tests/exporters/test_export.py": "class ExportTesterMixin: ...",
    "tests/generation/test_utils.py": "class GenerationTesterMixin: ...",
    # What the real one has, but for problem_type "regression" and a single label.
    "tests/utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["BertModel"],
    "id2label": {0: "label", 1: "other"},
    "label2id": {"label": 0, "other": 1},
    "problem_type": "multi_label_classification",
}""",
    # In the place of the photograph that it would download: a smooth picture.
    "utils/fetch_hub_objects_for_ci.py": """import numpy as np
from PIL import Image

def url_to_local_path(url):
    y, x, channel = np.mgrid[:480, :640, :3]
    waves = np.sin(x / 40 + channel) * np.cos(y / 30 - channel)
    Image.fromarray((127 + 120 * waves).astype(np.uint8)).save("picture.png")
    return "picture.png"
""",
}
PLACES = {
    "testers.py": "tests/models/testers.py",
    "our_models.py": "tests/models/vit_scratch/test_vit_scratch.py",
    "vit_models.py": "tests/models/vit/test_vit.py",
}
INI = "[pytest]\nmarkers =\n    is_training_test\n    torch_compile_test\n"

pytestmark = [pytest.mark.peer, pytest.mark.timeout(1800)]

Outcomes = dict[str, dict[str, str]]  # test class: test: "passed", "skipped: why" or "failed: why"


@pytest.fixture(scope="module")
def peer_folder(request, tmp_path_factory) -> Path:
    """A folder with transformers' common tests and ours among them."""
    pytest.importorskip("parameterized", reason="needs parameterized, of the peer extra")
    folder = tmp_path_factory.mktemp("transformers")
    with tarfile.open(_source_distribution(request.config.cache)) as archive:
        for member in archive.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name.startswith("tests/"):
                archive.extract(member, folder, filter="data")
    for place, text in STUBS.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    for name, place in PLACES.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SUITE / name, folder / place)
    for package in [folder / "tests", *(path for path in (folder / "tests").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    (folder / "pytest.ini").write_text(INI)
    return folder


def _source_distribution(cache) -> Path:
    """The source distribution of the installed transformers: from pytest's cache, else from the package index."""
    version = transformers.__version__
    folder = cache.mkdir(f"transformers-{version}")
    if not (found := list(folder.glob("*.tar.gz"))):
        command = [sys.executable, "-m", "pip", "download", f"transformers=={version}", "--no-deps", "--retries", "1"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1]
            pytest.skip(f"the source distribution of transformers {version} cannot be downloaded: {why}")
        found = list(folder.glob("*.tar.gz"))
    return found[0]


@pytest.fixture(scope="module")
def outcomes(peer_folder) -> Outcomes:
    return {**_run(peer_folder, "vit_scratch"), **_run(peer_folder, "vit")}


def _run(folder: Path, model: str) -> Outcomes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), environment.get("PYTHONPATH")]))
    environment["RUN_SLOW"] = "1"
    report = folder / f"{model}.xml"
    command = [sys.executable, "-m", "pytest", f"tests/models/{model}", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", ".", "--junitxml", str(report)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    outcomes: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tests = outcomes.setdefault(case.get("classname", "").rpartition(".")[2], {})
        name, found = case.get("name", ""), _outcome(case)
        before = tests.get(name, "passed")  # a test has an entry for each of its subtests
        tests[name] = before if before.startswith("failed") or found == "passed" else found
    return outcomes


def _outcome(case: ElementTree.Element) -> str:
    for kind, said in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (element := case.find(kind)) is not None:
            return f"{said}: {element.get('message')}"
    return "passed"


def _named(tests: dict[str, str], kind: str) -> dict[str, str]:
    return {name: outcome for name, outcome in tests.items() if outcome.startswith(kind)}


@pytest.mark.parametrize("ours", PEERS)
def test_none_of_transformers_tests_fails_on_our_classes(outcomes, ours):
    assert _named(outcomes[ours], "failed") == {}


@pytest.mark.parametrize("ours", PEERS)
def test_what_is_skipped_is_skipped_by_transformers_own_class_too_or_listed(outcomes, ours):
    skipped = _named(outcomes[ours], "skipped")
    assert skipped.keys() - _named(outcomes[PEERS[ours]], "skipped").keys() <= CANNOT_APPLY.keys()


@pytest.mark.parametrize("ours", [name for name in PEERS if not name.endswith("TrainingTest")])
def test_every_test_of_transformers_own_class_runs_on_ours(outcomes, ours):
    assert outcomes[PEERS[ours]].keys() - outcomes[ours].keys() == set()


@pytest.mark.parametrize("ours", PEERS)
def test_a_shared_skip_is_of_a_known_kind(outcomes, ours):
    skipped = {name: why for name, why in _named(outcomes[ours], "skipped").items() if name not in CANNOT_APPLY}
    known = re.compile("|".join(f"(?:{kind})" for kind in SHARED_REASONS.values()))
    assert {name: why for name, why in skipped.items() if not known.fullmatch(why.removeprefix("skipped: "))} == {}


def test_no_entry_of_the_list_has_become_needless(outcomes):
    needed = set()
    for ours, theirs in PEERS.items():
        needed |= _named(outcomes[ours], "skipped").keys() & _named(outcomes[theirs], "passed").keys()
    assert CANNOT_APPLY.keys() - needed == set()


def test_transformers_own_classes_pass_their_tests_here(outcomes):
    failed = {name for theirs in PEERS.values() for name in _named(outcomes[theirs], "failed")}
    assert failed == FAILED_BY_VIT


def test_the_tests_that_are_defined_anew_are_listed():
    tree = ast.parse((SUITE / "our_models.py").read_text() + (SUITE / "testers.py").read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name for name in defined if name.startswith("test_")} == OVERRIDDEN.keys()
