"""A new card laid into the one a repository already has: front matter by key, our text between two markers.

What somebody wrote by hand stays as it is, byte for byte. A key counts as ours only while it still holds the value
that our previous push wrote.
"""

import itertools
import re
from typing import Any

import yaml
from huggingface_hub.utils import yaml_dump

from modeling_vit_scratch.errors_vit_scratch import InputError

__all__ = ["BEGIN_MARKER", "END_MARKER", "merge_card"]

BEGIN_MARKER = "<!-- vit-scratch: begin; written by `vit-scratch push`, edit outside these two lines -->"
END_MARKER = "<!-- vit-scratch: end -->"

_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\n(.*?)(?:\n|(?<=\n))---[ \t]*(?:\n|\Z)", re.DOTALL)
# These say what the files of this commit are, so a value written by hand cannot be right where it differs.
_OURS_ALWAYS = ("library_name", "pipeline_tag")


def merge_card(
    metadata: dict[str, Any],
    body: str,
    existing: str | None = None,
    previous_metadata: dict[str, Any] | None = None,
) -> str:
    """Returns the whole card.

    Args:
        metadata: Our front matter.
        body: Our text.
        existing: The card that is there, or None.
        previous_metadata: The front matter our previous push wrote, or None.
    """
    section = f"{BEGIN_MARKER}\n\n{body.strip()}\n\n{END_MARKER}\n"
    if existing is None or not existing.strip():
        return f"---\n{_dump(metadata)}---\n\n{section}"
    newline = "\r\n" if "\r\n" in existing else "\n"
    existing = existing.removeprefix("\ufeff").replace("\r\n", "\n")
    match = _FRONT_MATTER.match(existing)
    block, text = (match.group(1), existing[match.end() :]) if match else ("", existing)
    # A key without a value says nothing: it counts as absent, and gets ours.
    theirs = {key: value for key, value in _parse(block).items() if value not in (None, "", [])}
    changes = _changes(metadata, theirs, previous_metadata or {})
    merged = f"---\n{_edit_block(block, changes)}---\n{_place_section(text, section)}"
    return merged.replace("\n", newline)


def _dump(metadata: dict[str, Any]) -> str:
    return yaml_dump(metadata, sort_keys=False)


def _parse(block: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(block)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"README.md of the repository: front matter cannot be read ({reason}); mend it there"
        ) from error
    if content is not None and not isinstance(content, dict):
        raise InputError("README.md of the repository: front matter holds no fields; mend it there")
    return content or {}


def _changes(ours: dict[str, Any], theirs: dict[str, Any], previous: dict[str, Any]) -> dict[str, Any]:
    """Returns the new value of every key that has to change; None takes the key out."""
    changes: dict[str, Any] = {}
    for key in [*theirs, *(key for key in ours if key not in theirs)]:
        if key == "model-index" and key in theirs:
            new = _merge_model_index(ours.get(key, []), theirs[key], previous.get(key, [])) or None
        elif key == "tags" and key in theirs:
            new = _merge_lists(ours.get(key, []), theirs[key], previous.get(key, []))
        elif key not in theirs or key in _OURS_ALWAYS or (key in previous and theirs[key] == previous[key]):
            new = ours.get(key, theirs.get(key) if key in _OURS_ALWAYS else None)
        else:
            continue
        if new != theirs.get(key):
            changes[key] = new
    return changes


def _merge_lists(ours: list[str], theirs: Any, previous: list[str]) -> list[str]:
    theirs = theirs if isinstance(theirs, list) else [theirs]
    kept = [item for item in theirs if item in ours or item not in previous]
    return kept + [item for item in ours if item not in kept]


def _merge_model_index(ours: list[Any], theirs: Any, previous: list[Any]) -> list[Any]:
    """Results of other models stay; one of the same name, or the one our previous push wrote, is replaced."""
    names = {model["name"] for model in ours}
    theirs = theirs if isinstance(theirs, list) else []
    kept = [m for m in theirs if m not in previous and not (isinstance(m, dict) and m.get("name") in names)]
    return kept + ours


def _edit_block(block: str, changes: dict[str, Any]) -> str:
    """Returns the YAML block with the changed keys replaced; all other lines, comments too, stay as typed."""
    lines = block.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    starts = [index for index, line in enumerate(lines) if re.match(r"[^\s#\-{][^:]*:(\s|$)", line)]
    if lines and not starts and _parse(block):  # {license: mit}: one line that cannot be edited by key
        return _dump({key: value for key, value in {**_parse(block), **changes}.items() if value is not None})
    first = starts[0] if starts else len(lines)
    result = lines[:first]
    for start, stop in itertools.pairwise([*starts, len(lines)]):
        key = lines[start].split(":")[0].strip("\"' ")
        if key not in changes:
            result += lines[start:stop]
            continue
        value = changes.pop(key)
        result += [_dump({key: value})] if value is not None else []
        result += [line for line in lines[start + 1 : stop] if line.startswith("#") or not line.strip()]
    added = {key: value for key, value in changes.items() if value is not None}
    return "".join(result) + (_dump(added) if added else "")


def _place_section(text: str, section: str) -> str:
    begins, ends = text.count(BEGIN_MARKER), text.count(END_MARKER)
    if not begins and not ends:
        return f"{text.rstrip()}\n\n{section}" if text.strip() else f"\n{section}"
    if (begins, ends) != (1, 1) or text.index(END_MARKER) < text.index(BEGIN_MARKER):
        raise InputError(
            f"README.md of the repository: the line {BEGIN_MARKER!r} stands {begins} times and {END_MARKER!r} {ends} "
            "times, in this order both must stand once; restore them or take both out"
        )
    before, after = text[: text.index(BEGIN_MARKER)], text[text.index(END_MARKER) + len(END_MARKER) :]
    return before + section.rstrip("\n") + after
