"""Which code files travel, and whether a folder is still what was published."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

import modeling_vit_scratch
from hub_upload.manifest import CODE_ENTRY_POINTS, code_closure, verify_manifest, write_manifest
from modeling_vit_scratch.errors_vit_scratch import InputError

PACKAGE = Path(modeling_vit_scratch.__file__).parent


def test_the_closure_is_what_transformers_will_look_for():
    expected = set(CODE_ENTRY_POINTS)
    for name in CODE_ENTRY_POINTS:
        expected |= {Path(file).name for file in get_relative_import_files(PACKAGE / name)}
    assert set(code_closure(PACKAGE)) == expected


def test_importing_hub_upload_registers_nothing():
    code = "import sys, hub_upload; sys.exit('modeling_vit_scratch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_the_closure_holds_every_file_that_its_own_files_name():
    closure = code_closure(PACKAGE)
    named = {
        f"{module}.py"
        for file in closure
        for module in re.findall(r"^\s*from \.(\w+) import", (PACKAGE / file).read_text(), re.MULTILINE)
    }
    assert named <= set(closure)


def test_the_closure_leaves_out_the_package_and_the_converters():
    assert not [name for name in code_closure(PACKAGE) if name == "__init__.py" or name.startswith("convert_")]


@pytest.mark.parametrize("line", ["from . import other", "from ..outside import x", "from .sub.module import x"])
def test_an_import_that_a_downloader_cannot_follow_is_refused(tmp_path, line):
    (tmp_path / "modeling_vit_scratch.py").write_text(f"import torch\n{line}\n")
    with pytest.raises(AssertionError, match="line 2"):
        code_closure(tmp_path, ("modeling_vit_scratch.py",))


@pytest.fixture
def published(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_bytes(b"picture")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# card")
    write_manifest(tmp_path)
    return tmp_path


def test_an_untouched_folder_is_accepted(published):
    assert set(verify_manifest(published)["files"]) == {"config.json", "figures/a.png"}


def test_a_card_edited_by_hand_is_accepted(published):
    (published / "README.md").write_text("# card, with my own words")
    verify_manifest(published)


def test_every_damaged_file_is_named(published):
    (published / "figures" / "a.png").write_bytes(b"pictur3")
    (published / "config.json").unlink()
    with pytest.raises(InputError, match=r"config.json is missing; figures/a.png has another sha256"):
        verify_manifest(published)


def test_a_truncated_file_is_named_with_both_sizes(published):
    (published / "figures" / "a.png").write_bytes(b"pic")
    with pytest.raises(InputError, match=r"a\.png has 3 bytes instead of 7"):
        verify_manifest(published)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 1, "files": {"a": {}}}', '{"schema_version": 9}']
)
def test_a_file_that_is_no_manifest_is_refused(published, text):
    (published / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json"):
        verify_manifest(published)


def test_a_folder_without_manifest_is_refused(tmp_path):
    with pytest.raises(InputError, match="not published"):
        verify_manifest(tmp_path)


def test_the_facts_stand_beside_the_hashes(tmp_path):
    write_manifest(tmp_path, code_files=["a.py"])
    assert json.loads((tmp_path / "manifest.json").read_text())["code_files"] == ["a.py"]
