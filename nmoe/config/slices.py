"""Slices behind a path or a split's name: `train.jsonl@[:1024]`, `train[10%:]`."""

import re

Slice = tuple[str | None, str | None]
"""First and last bound as they are written: digits, with a minus in front or a percent sign behind, or None."""

_BOUND = r"-?\d+%?"
_SLICE = rf"\[(?P<start>{_BOUND})?:(?P<stop>{_BOUND})?\]"
_PATH = re.compile(rf"(?P<name>.+)@{_SLICE}", re.DOTALL)
_SPLIT = re.compile(rf"(?P<name>\w[\w.-]*)(?:{_SLICE})?")


def split_path(path: str) -> tuple[str, Slice]:
    """A path without the slice behind it, and the slice: `("train.jsonl", (None, "1024"))`."""
    match = _PATH.fullmatch(path)
    return (path, (None, None)) if match is None else (match["name"], (match["start"], match["stop"]))


def split_name(split: str) -> tuple[str, Slice] | None:
    """A split's name and its slice; None for anything else, such as a sum of splits."""
    match = _SPLIT.fullmatch(split)
    return None if match is None else (match["name"], (match["start"], match["stop"]))


def rows_of(part: Slice, length: int) -> range:
    """Which of `length` rows: as Python slices, with percents rounded to the nearest row as the datasets library does."""

    def bound(text: str | None) -> int | None:
        if text is None or not text.endswith("%"):
            return None if text is None else int(text)
        return round(int(text[:-1]) * length / 100)

    return range(*slice(bound(part[0]), bound(part[1])).indices(length))
