"""Lists and errors of others, short enough for the one line of a message."""

from collections.abc import Iterable

__all__ = ["one_line", "some"]


def some(names: Iterable[str], limit: int = 6) -> str:
    """Returns the first names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[:limit]) or "nothing") + more


def one_line(error: BaseException, length: int = 200) -> str:
    """Returns what an error says, or where transformers wraps a check of a config what the check says, cut short."""
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= length else f"{text[: length - 3]}..."
