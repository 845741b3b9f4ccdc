"""docs/options.md says what there is: every field, choice, class and converter has a row, and no row names more."""

import ast
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
from fixtures_modeling import TINY

import modeling_vit_scratch
from modeling_vit_scratch import ViTScratchConfig
from modeling_vit_scratch.configuration_vit_scratch import HYBRIDS, VARIANTS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "modeling_vit_scratch"
PAGE = (ROOT / "docs" / "options.md").read_text()


class Row(NamedTuple):
    feature: str
    fields: list[str]
    """What stands between backticks: keyword arguments of the config, a class, or a function of a converter."""
    source: str
    tests: list[str]


def rows_of(page: str) -> list[Row]:
    rows = []
    for line in page.splitlines():
        if not line.startswith("|") or line.startswith(("| feature |", "|---")):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4, line
        rows.append(Row(cells[0], re.findall(r"`([^`]+)`", cells[1]), cells[2], re.findall(r"`([^`]+)`", cells[3])))
    return rows


ROWS = rows_of(PAGE)
SPANS = [span for row in ROWS for span in row.fields]


def call_of(span: str) -> ast.Call | None:
    """`span` as the arguments of a call, if it is keyword arguments."""
    try:
        call = ast.parse(f"config({span})", mode="eval").body
    except SyntaxError:
        return None
    return call if isinstance(call, ast.Call) and call.keywords and not call.args else None


def keywords(span: str) -> dict[str, Any]:
    call = call_of(span)
    return {} if call is None else {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}


CONFIGS = [span for span in SPANS if keywords(span)]
NAMES = [span for span in SPANS if not keywords(span)]


def converters() -> set[str]:
    """module.function of all that reads or writes the checkpoints of a peer."""
    return {
        f"{path.stem}.{node.name}"
        for path in PACKAGE.glob("convert_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("from_", "to_"))
    }


def test_the_page_has_rows():
    assert len(ROWS) > 50


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.feature)
def test_a_row_names_fields_a_source_and_a_test(row):
    assert row.feature and row.fields and row.source and row.tests


def test_every_field_of_the_config_has_a_row():
    named = {field for span in CONFIGS for field in keywords(span)}
    assert {name.lstrip("_") for name in ViTScratchConfig.__annotations__} - named == set()


CHOICES = {
    name: get_args(kind) for name, kind in ViTScratchConfig.__annotations__.items() if get_origin(kind) is Literal
}


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_of_a_field_has_a_row(field):
    named = {value for span in CONFIGS for name, value in keywords(span).items() if name == field}
    assert set(CHOICES[field]) == named


@pytest.mark.parametrize("span", CONFIGS)
def test_the_fields_of_a_row_make_a_config(span):
    assert isinstance(ViTScratchConfig(**{**TINY, **keywords(span)}), ViTScratchConfig)


NAMED_VARIANTS = [(name, row) for row in ROWS for name in re.findall(r"[\w+]+/\d+", row.feature)]


def test_every_named_variant_has_a_row():
    names = {name for name, _ in NAMED_VARIANTS}
    assert {name for name in names if "+" in name} == set(HYBRIDS)
    assert {name.partition("/")[0] for name in names if "+" not in name} == set(VARIANTS)


@pytest.mark.parametrize(("name", "row"), NAMED_VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_named_variant_has_the_fields_of_its_row(name, row):
    config, fields = ViTScratchConfig.from_variant(name), keywords(row.fields[0])
    assert {field: getattr(config, field) for field in fields} == fields


def test_every_public_class_of_a_model_has_a_row():
    models = {name for name in modeling_vit_scratch.__all__ if name.startswith(("ViTScratchFor", "ViTScratchModel"))}
    assert models | {"ViTScratchBackbone", "ViTScratchImageProcessor"} <= set(NAMES)


def test_every_converter_has_a_row():
    assert converters() <= set(NAMES)


def test_no_row_names_something_else():
    assert set(NAMES) - converters() - set(modeling_vit_scratch.__all__) == set()


def test_every_test_that_a_row_names_exists():
    tests = {
        f"{path.name}::{node.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    named = [test for row in ROWS for test in row.tests]
    assert [test for test in named if test not in tests] == []
