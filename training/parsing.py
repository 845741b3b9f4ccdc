"""Recipe files and flags to recipes: every scalar is taken as its source text and read by the field's type."""

from __future__ import annotations

import argparse
import difflib
import math
import types
import typing
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from training.arguments import flat

__all__ = ["FlagParser", "UsageError", "dump_recipe", "parse_recipe", "read_recipe_file", "recipe_names"]

_RECIPES = Path(__file__).parent / "recipes"
_TRUTH = {"true": True, "false": False, "yes": True, "no": False}


class UsageError(ValueError):
    """A flag or a recipe line is wrong; the message says which and what to write instead."""


class FlagParser(argparse.ArgumentParser):
    """`argparse` whose errors are `UsageError`, and whose flags are written in full."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parse_recipe(recipe_class: type, argv: list[str], *, prog: str, description: str) -> Any:
    """Returns the recipe that `--config FILE` and the flags describe; `recipe_class` holds the groups of fields."""
    options = _options(recipe_class)
    usage = f"{prog} [--config RECIPE] [--FIELD VALUE ...]"
    parser = FlagParser(prog=prog, usage=usage, description=description)
    parser.add_argument("--config", metavar="RECIPE", help=f"a YAML file, or one of {', '.join(recipe_names())}")
    hints = _types(recipe_class)
    for group in fields(recipe_class):
        section = parser.add_argument_group(group.name, typing.get_type_hints(recipe_class)[group.name].__doc__)
        for option in fields(typing.get_type_hints(recipe_class)[group.name]):
            section.add_argument(f"--{option.name}", **_argparse_form(option, hints[option.name]))
    namespace, rest = parser.parse_known_args(argv)
    if rest:
        _refuse(rest[0], [f"--{name}" for name in options], prog)
    texts = read_recipe_file(namespace.config) if namespace.config else {}
    _refuse_unknown_keys(texts, options, namespace.config, prog)
    values = {name: _read(texts[name][0], hints[name], texts[name][1]) for name in texts if name in options}
    for name in options:
        given = getattr(namespace, name)
        if given is not None:
            text = given[0] if isinstance(given, list) and len(given) == 1 else given
            values[name] = _read(text, hints[name], f"--{name}")
    return _build(recipe_class, values)


def read_recipe_file(config: str) -> dict[str, tuple[Any, str]]:
    """Returns {key: (source text or list of them, "file:line: key")} of a recipe file or a shipped recipe's name."""
    import yaml

    path = Path(config)
    if not path.is_file():
        shipped = _RECIPES / f"{config}.yaml"
        if not shipped.is_file():
            raise UsageError(f"--config {config}: no such file, nor one of the recipes {', '.join(recipe_names())}")
        path = shipped
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} is not a YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path.name} must hold lines of `field: value`")
    texts: dict[str, tuple[Any, str]] = {}
    for key, node in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{path.name}:{key.start_mark.line + 1} must be a line of `field: value`")
        place = f"{path.name}:{key.start_mark.line + 1}: {key.value}"
        if key.value in texts:
            raise UsageError(f"{place} stands a second time; keep one of the lines")
        if isinstance(node, yaml.ScalarNode):
            texts[key.value] = (node.value, place)
        elif isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
            texts[key.value] = ([item.value for item in node.value], place)
        else:
            raise UsageError(f"{place} must be one value or a list of values")
    return texts


def dump_recipe(recipe: Any) -> str:
    """Returns the effective recipe as YAML that `parse_recipe` reads back to the same recipe."""
    import yaml

    lines = []
    for name, value in flat(recipe).items():
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
        lines.append(f"{name}: {repr(value) if isinstance(value, float) else text}")
    return "\n".join(lines) + "\n"


def recipe_names() -> list[str]:
    """Returns the names of the shipped recipes."""
    return sorted(path.stem for path in _RECIPES.glob("*.yaml"))


def _build(recipe_class: type, values: dict[str, Any]) -> Any:
    groups = typing.get_type_hints(recipe_class)
    try:
        return recipe_class(
            **{
                name: group(**{option.name: values[option.name] for option in fields(group) if option.name in values})
                for name, group in groups.items()
            }
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _options(recipe_class: type) -> dict[str, Field]:
    return {option.name: option for group in typing.get_type_hints(recipe_class).values() for option in fields(group)}


def _types(recipe_class: type) -> dict[str, Any]:
    return {
        name: hint
        for group in typing.get_type_hints(recipe_class).values()
        for name, hint in typing.get_type_hints(group).items()
    }


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(kind) is list for kind in _alternatives(hint))


def _argparse_form(option: Field, hint: Any) -> dict[str, Any]:
    # Values stay text here: `_read` is the one parser of flags and recipe lines.
    default = "" if option.default is None else f" [{option.default}]"
    form: dict[str, Any] = {"help": (option.metadata["help"] + default).replace("%", "%%"), "metavar": _form(hint)}
    if _is_list(hint):
        form["nargs"] = "+"
    elif bool in _alternatives(hint):
        form.update(nargs="?", const="true")
    return form


def _form(hint: Any) -> str:
    forms = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            forms.append("|".join(typing.get_args(kind)))
        elif typing.get_origin(kind) is list:
            forms.append(f"list of {typing.get_args(kind)[0].__name__}")
        elif kind is not type(None):
            forms.append({bool: "true|false"}.get(kind, kind.__name__))
    return " or ".join(forms)


def _read(text: str | list[str], hint: Any, place: str) -> Any:
    for kind in _alternatives(hint):
        try:
            return _read_as(text, kind)
        except (KeyError, TypeError, ValueError):
            continue
    shown = " ".join(text) if isinstance(text, list) else text
    raise UsageError(f"{place}: {shown!r} must be {_form(hint)}")


def _read_as(text: str | list[str], kind: Any) -> Any:
    if kind == list[str] and isinstance(text, list):
        return text  # a class may be called `none`
    if typing.get_origin(kind) is list:
        return [_read_as(item, typing.get_args(kind)[0]) for item in ([text] if isinstance(text, str) else text)]
    if isinstance(text, list):
        if len(text) != 1:
            raise ValueError(text)
        text = text[0]
    if kind is type(None):
        return {"none": None, "null": None, "~": None, "": None}[text.lower()]
    if typing.get_origin(kind) is Literal:
        return {choice: choice for choice in typing.get_args(kind)}[text]
    if kind is bool:
        return _TRUTH[text.lower()]
    if kind is str and text.lower() in ("none", "null", "~", ""):
        raise ValueError(text)  # the alternative None reads it
    value = kind(text)
    if kind is float and not math.isfinite(value):
        raise ValueError(text)
    return value


def _refuse_unknown_keys(texts: dict[str, Any], options: dict[str, Field], config: str, prog: str) -> None:
    for name in texts:
        if name not in options and name != "verb":
            close = difflib.get_close_matches(name, options, n=1)
            raise UsageError(f"{texts[name][1]} is no field of {prog}{f'; did you mean {close[0]}?' if close else ''}")
    verb = texts.get("verb", (None, ""))[0]
    if verb is not None and verb != prog.split()[-1]:
        raise UsageError(f"{config} is a recipe of `vit-scratch {verb}`, not of `{prog}`")


def _refuse(flag: str, known: list[str], prog: str) -> NoReturn:
    close = difflib.get_close_matches(flag.split("=")[0], known, n=1)
    raise UsageError(f"there is no flag {flag}{f'; did you mean {close[0]}?' if close else ''}; see {prog} --help")
