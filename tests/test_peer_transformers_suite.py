"""The common tests of the installed transformers, from its source distribution, on our classes.

They also run on transformers' own ViT, DINOv2 backbone and ViT image processor. Every test that those pass must pass
here, but for the few below, each of which cannot apply.
"""

import ast
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import transformers

REPO = Path(__file__).parent.parent
SUITE = Path(__file__).parent / "peer_suite"

# What transformers' own models pass and ours skip: the feature that is tested is not there, on purpose.
CANNOT_APPLY = {
    "test_can_capture_specific_layers_hidden_states": "outputs are gathered by a plain loop, not a private decorator",
    "test_capture_outputs_decorator": "outputs are gathered by a plain loop, not a private decorator",
    "test_can_load_from_already_mapped_keys": "checkpoints are stored under our names: nothing is renamed on loading",
    "test_reverse_loading_mapping": "checkpoints are stored under our names: nothing is renamed on loading",
    "test_problem_types": "asks for regression, and for a softmax over one class; the configuration refuses both",
    "test_fast_image_processor_explicit_none_preserved": "there is no do_resize, do_rescale or do_normalize to unset",
}
# Tests that our suite defines in the place of transformers'.
OVERRIDDEN = {
    "test_config": "each model calls the ConfigTester for itself",
    "test_training_overfit": "the mixin has batches of text only; ViT runs with the same batch of images",
    "test_model_get_set_embeddings": "the mixin expects word embeddings; ViT overrides it too",
    "test_model_weights_reload_no_missing_tied_weights": "a file without the encoder's weights is refused",
    "test_problem_types": "skipped, see above",
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
    "utils/fetch_hub_objects_for_ci.py": "def url_to_local_path(url): return url",
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
            top, _, member.name = member.name.partition("/")
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
        command = [sys.executable, "-m", "pip", "download", f"transformers=={version}", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"transformers {version} has no source distribution to download: {done.stderr.strip()[-300:]}")
        found = list(folder.glob("*.tar.gz"))
    return found[0]


def _run(folder: Path, model: str) -> Outcomes:
    report = folder / f"{model}.xml"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", f"tests/models/{model}", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", ".", "--junitxml", str(report)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    outcomes: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tests = outcomes.setdefault(case.get("classname", "").rpartition(".")[2], {})
        found = _outcome(case)
        if _is_worse(found, tests.get(case.get("name"))):  # a test has an entry for each of its subtests
            tests[case.get("name")] = found
    return outcomes
