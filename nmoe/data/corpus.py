"""Trains a tokenizer on a corpus: texts from files of any format that nmoe reads, one text at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.data.rows import is_pattern, local_copy, matching, read_rows
from nmoe.errors import UserError
from nmoe.text.tokenizer import Tokenizer

_TEXT_FILES = (".txt", ".md")
_COLUMNS = ("text", "messages", "conversations")
_SAMPLE_CHARS = 1_000_000


def train_tokenizer(
    paths: Sequence[str], directory: Path, vocab_size: int, column: str | None = None, most_chars: int | None = None
) -> Iterator[str]:
    """Trains a tokenizer on the texts in the named files or datasets, up to `most_chars` characters, and writes it to `directory`.
    Yields lines about the texts read and their compression.

    Raises UserError for texts that cannot be read, for a corpus without any, and if `directory` has a tokenizer already.
    """
    if (directory / "tokenizer.json").exists():
        raise UserError(f"{directory}: has a tokenizer already; name another directory")
    corpus = _Corpus(paths, column, most_chars)
    tokenizer = Tokenizer.train(corpus.texts(), vocab_size)
    if corpus.chars == 0:
        raise UserError(f"{', '.join(paths)}: no text")
    tokenizer.save(directory)
    yield f"{corpus.count:,} texts of {corpus.chars:,} characters" + (", and more left out" if corpus.cut else "")
    fewer = "" if tokenizer.vocab_size == vocab_size else f" (of {vocab_size:,}: no other pair occurs twice)"
    yield f"{tokenizer.vocab_size:,} tokens{fewer}"
    read = sum(len(text.encode()) for text in corpus.sample)
    tokens = sum(len(tokenizer.encode(text)) for text in corpus.sample)
    yield f"{read / tokens:.2f} bytes a token on the first {read:,} bytes"


class _Corpus:
    """Reads the texts of a corpus in order and counts them; keeps the first million characters, to measure compression."""

    def __init__(self, paths: Sequence[str], column: str | None, most_chars: int | None) -> None:
        self._paths, self._column, self._most = paths, column, most_chars
        self.count = self.chars = 0
        self.cut = False
        self.sample: list[str] = []

    def texts(self) -> Iterator[str]:
        """Yields the texts; the last one is cut if it would exceed the limit."""
        for path in self._paths:
            for text in _texts(path, self._column):
                left = len(text) if self._most is None else self._most - self.chars
                if left <= 0:
                    self.cut = True
                    return
                text = text[:left]
                if self.chars < _SAMPLE_CHARS:
                    self.sample.append(text[: _SAMPLE_CHARS - self.chars])
                self.count += 1
                self.chars += len(text)
                yield text


def _texts(path: str, column: str | None) -> Iterator[str]:
    files = matching(Path(), [path]) if is_pattern(path) else [found] if (found := local_copy(path)) else []
    if files and all(file.is_file() and file.suffix in _TEXT_FILES for file in files):
        for file in files:
            yield from _passages(file)
        return
    for where, row in read_rows(path):
        yield from _of_row(where, row, column)


def _passages(path: Path) -> Iterator[str]:
    """Yields the content of a text file in passages that give the tokenizer the same pieces as the whole, so that a file may be
    larger than memory. A passage ends in a line break, and the next begins with something other than white space: no piece spans
    that (`nmoe.text.tokenizer.PIECE_PATTERN`), but pieces have several line breaks, and indentation before one."""
    passage: list[str] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line in file:
                if passage and not line[0].isspace():
                    yield "".join(passage)
                    passage.clear()
                passage.append(line)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text in UTF-8: {error}") from error
    if passage:
        yield "".join(passage)


def _of_row(where: str, row: Mapping[str, Any], column: str | None) -> Iterator[str]:
    """Yields the texts of a row: of its text column, or of all messages of a conversation in it. Raises UserError if it has
    none."""
    name = column or next((one for one in _COLUMNS if row.get(one) is not None), None)
    value = None if name is None else row.get(name)
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        for message in value:
            content = message.get("content", message.get("value"))
            yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    else:
        there = ", ".join(map(repr, row)) or "none"
        missing = repr(column) if column else " or ".join(map(repr, _COLUMNS))
        raise UserError(f"{where}: no text in {missing}; the columns are {there}; name one with --column")
