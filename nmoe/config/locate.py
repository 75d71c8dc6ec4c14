"""Finds the line of every key and array item of a TOML text, since `tomllib` returns no positions.

The text is already known to be valid TOML, so the scanner only follows its structure: table headers, the ends of strings, nested
arrays. It decodes nothing but quoted keys.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nmoe.parsing import toml_of

KeyPath = tuple[str | int, ...]
"""The keys and indices that lead from the top of a document to a value: `("task_pool", "sources", 1, "weight")`."""


@dataclass(frozen=True)
class Place:
    """The source of a value: a file and line, `Place("configs/grpo.toml", line=12)`, or the text of an override.

    `root` is the number of leading keys of a path that the source leaves out: a separate file with the contents of `[environment]`
    names its keys without that prefix, and an override's text contains its whole path. Relative paths in the source start from
    `directory`.
    """

    source: str
    line: int | None = None
    root: int = 0
    directory: Path = Path()
    is_override: bool = False

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass
class Locator:
    """The file and line of every value of a document, by key path. A value without a known line gets its table's."""

    root: Place
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Returns the place of `path`, else of the nearest table or array around it, else of the document."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.root

    def place_of_key(self, path: KeyPath) -> Place:
        """Returns the place where the key `path` is written, else where a key below it is (as in an override), else the place of
        the table."""
        below = (place for known, place in self.places.items() if known[: len(path)] == path)
        return self.places.get(path) or next(below, self.place(path))

    def adopt(self, path: KeyPath, other: "Locator") -> None:
        """Takes the file and line of the value at `path`, and of all values below it, from `other`: the locator of the document
        from which the value now comes."""
        self.places = {known: place for known, place in self.places.items() if known[: len(path)] != path}
        self.places[path] = other.place(path)
        self.places |= {known: place for known, place in other.places.items() if known[: len(path)] == path}

    def below(self, prefix: KeyPath) -> "Locator":
        """Returns this locator with all paths moved below `prefix`, for a document whose contents are inserted there into
        another."""

        def moved(place: Place) -> Place:
            return replace(place, root=place.root + len(prefix))

        places = {prefix + path: moved(place) for path, place in self.places.items()}
        return Locator(moved(self.root), places | {prefix: moved(self.root)})


def locate(text: str, file: Path) -> Locator:
    """Returns the locator (key path to line) of the valid TOML document `text`, read from `file`."""
    root = Place(str(file), directory=file.parent)
    lines = _Scanner(text).scan()
    return Locator(root, {path: replace(root, line=line) for path, line in lines.items()})


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BASIC_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERAL_STRING = re.compile(r"'[^']*'")
# The longest string that ends at three quotes; up to two quotes before those belong to the content.
_MULTILINE_BASIC = re.compile(r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}', re.DOTALL)
_MULTILINE_LITERAL = re.compile(r"'''(?:[^']|'{1,2}(?!'))*'{3,5}", re.DOTALL)
_SCALAR = re.compile(r"[^,\]}#\n]+")
_BLANK = re.compile(r"[ \t]*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")


class _Scanner:
    """Scans a document once. `at` is the current offset; `lines` collects the line of each key path."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.lines: dict[KeyPath, int] = {}
        self.table_counts: dict[KeyPath, int] = {}  # of each array of tables, the number of items so far

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self._take(_BLANK_LINES)
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                table = self._array_header()
            elif self.text.startswith("[", self.at):
                table = self._header()
            else:
                self._pair(table)
            self._take(_BLANK_LINES)
        return self.lines

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"valid TOML has {pattern.pattern} at offset {self.at}"
        self.line += match[0].count("\n")
        self.at = match.end()
        return match[0]

    def _literally(self, token: str) -> None:
        assert self.text.startswith(token, self.at), f"valid TOML has {token!r} at offset {self.at}"
        self.at += len(token)

    def _key(self) -> list[str]:
        """Consumes a key of one or more parts, such as `a."b c".d`, with the blanks around it; returns the parts."""
        parts = []
        while True:
            self._take(_BLANK)
            if self.text[self.at] == '"':
                parts.append(toml_of(f"key = {self._take(_BASIC_STRING)}")["key"])
            elif self.text[self.at] == "'":
                parts.append(self._take(_LITERAL_STRING)[1:-1])
            else:
                parts.append(self._take(_BARE_KEY))
            self._take(_BLANK)
            if self.text[self.at] != ".":
                return parts
            self.at += 1

    def _enter(self, table: KeyPath, parts: list[str]) -> KeyPath:
        """Returns the path of `parts` below `table`, recording the current line for tables that first appear here. An array of
        tables stands for its last item."""
        for part in parts:
            table = (*table, part)
            self.lines.setdefault(table, self.line)
            if table in self.table_counts:
                table = (*table, self.table_counts[table] - 1)
        return table

    def _header(self) -> KeyPath:
        self._literally("[")
        parts = self._key()
        self._literally("]")
        table = self._enter((), parts)
        # A header may come after the headers of tables below it; the table's line is its header's.
        self.lines[table] = self.line
        return table

    def _array_header(self) -> KeyPath:
        self._literally("[[")
        parts = self._key()
        self._literally("]]")
        array = (*self._enter((), parts[:-1]), parts[-1])
        self.lines.setdefault(array, self.line)
        count = self.table_counts.get(array, 0)
        self.table_counts[array] = count + 1
        self.lines[(*array, count)] = self.line
        return (*array, count)

    def _pair(self, table: KeyPath) -> None:
        path = self._enter(table, self._key())
        self._literally("=")
        self._take(_BLANK)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        ahead = self.text[self.at : self.at + 3]
        if ahead.startswith("["):
            self._items("[", "]", lambda index: self._item((*path, index)))
        elif ahead.startswith("{"):
            self._items("{", "}", lambda _: self._pair(path))
        elif ahead == '"""':
            self._take(_MULTILINE_BASIC)
        elif ahead == "'''":
            self._take(_MULTILINE_LITERAL)
        elif ahead.startswith('"'):
            self._take(_BASIC_STRING)
        elif ahead.startswith("'"):
            self._take(_LITERAL_STRING)
        else:
            self._take(_SCALAR)

    def _item(self, path: KeyPath) -> None:
        self.lines[path] = self.line
        self._value(path)

    def _items(self, opening: str, closing: str, scan_item: Callable[[int], None]) -> None:
        """Consumes a comma-separated list in brackets (an array or inline table), calling `scan_item` with the index of each
        item."""
        self._literally(opening)
        index = 0
        self._take(_BLANK_LINES)
        while not self.text.startswith(closing, self.at):
            scan_item(index)
            index += 1
            self._take(_BLANK_LINES)
            if self.text.startswith(",", self.at):
                self.at += 1
                self._take(_BLANK_LINES)
        self._literally(closing)
