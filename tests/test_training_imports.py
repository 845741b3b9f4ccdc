"""The arrows of ARCHITECTURE.md, read off the imports."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("modeling_vit_scratch", "training", "hub_upload")
# They join the packages, by imports inside functions.
ENTRY_POINTS = {"training/demo.py", "training/publishing.py"}


def imported_packages(path: Path) -> set[str]:
    """The project's packages that a file imports absolutely, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names & set(PACKAGES)


def files_of(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("package, allowed", [
    ("modeling_vit_scratch", set()),
    ("training", {"modeling_vit_scratch", "training"}),
    ("hub_upload", {"modeling_vit_scratch", "hub_upload"}),
])  # fmt: skip
def test_a_package_imports_only_what_its_arrows_allow(package, allowed):
    found = {path.relative_to(ROOT).as_posix(): imported_packages(path) - allowed for path in files_of(package)}
    crossing = {name for name, packages in found.items() if packages}
    assert crossing <= ENTRY_POINTS


@pytest.mark.parametrize("name", sorted(ENTRY_POINTS))
def test_an_entry_point_imports_the_hub_package_inside_functions_only(name):
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [node for node in top_level if isinstance(node, ast.ImportFrom) and "hub_upload" in (node.module or "")]


def test_architecture_names_every_module_and_no_other():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    modules = {path.name for package in PACKAGES for path in files_of(package) if path.name != "__init__.py"}
    named = {word.strip("`") for line in text.splitlines() if line.startswith("|") for word in line.split()}
    assert modules == {word for word in named if word.endswith(".py")}


def test_no_module_bears_the_name_of_an_installed_library():
    from importlib.metadata import packages_distributions

    libraries = set(packages_distributions()) - set(PACKAGES)
    names = {path.stem for package in PACKAGES for path in files_of(package)} - {"__init__"}
    assert not names & libraries
