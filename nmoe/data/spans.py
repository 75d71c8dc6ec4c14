"""Divides a dataset of documents into spans, each of which a process can read by itself: lines or rows that follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from nmoe.config.base import Slice, rows_of, split_path
from nmoe.data.rows import (
    COMPRESSED,
    UNREADABLE,
    Row,
    dataset_rows,
    form_of,
    json_object,
    named_files,
    open_dataset,
    opened,
    parquet_rows,
    read_rows,
    unreadable,
)
from nmoe.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("text", "token_ids", "prompt_tokens")
"""What a document may consist of; other columns are not read."""

# Of a compressed file, and of a row group, all that lies before a span is read, too. With at most this many spans that takes less
# time than to tokenise them.
_MOST_PARTS = 64
_BYTES = 1 << 20


@dataclass(frozen=True)
class Span:
    """A part of a dataset: `Span("a.jsonl", "lines", 0, 4096, size=4096)` has the lines of a.jsonl that begin in its first 4 KiB.

    form: how to read it. "lines": the lines that begin in the bytes from `first` to `last` of a file, after decompression; "group":
        rows from `first` to `last` of the row group number `group` of a Parquet file; "dataset": rows of a dataset that `datasets`
        loads; "whole": all rows, of a file that can only be read from its beginning.
    size: the bytes of its text, about.
    skip, take: the rows of it that a slice of the dataset leaves; a `take` of None means all.
    pieces: the pieces of its documents to read, the first ones, because the others are held out; None means all.
    stamp: size and time of modification of the file when the span was made; of several files of a whole, their sums.
    """

    path: str
    form: Literal["lines", "group", "dataset", "whole"]
    first: int
    last: int
    size: int
    group: int = 0
    skip: int = 0
    take: int | None = None
    pieces: int | None = None
    stamp: tuple[int, int] | None = None

    def __str__(self) -> str:
        unit = "bytes" if self.form == "lines" else "rows"
        return self.path if self.form == "whole" else f"{self.path}, {unit} {self.first:,} to {self.last:,}"


def spans_of(path: str, span_bytes: int) -> list[Span]:
    """Divides the dataset that `path` names (`nmoe.data.rows`) into spans of about `span_bytes`, in order. Raises UserError if it
    cannot be read."""
    files, part = named_files(path), split_path(path)[1]
    if files is None:
        return list(_of_dataset(path, span_bytes))
    if not all(form_of(file) in ("jsonl", "parquet") for file in files):
        stamp = _stamp(*files)
        return [Span(path, "whole", 0, 0, stamp[0], stamp=stamp)]
    spans = [span for file in files for span in _of_file(file, span_bytes)]
    return spans if part == (None, None) else list(_sliced(spans, part))


def _of_file(file: Path, span_bytes: int) -> Iterator[Span]:
    stamp = _stamp(file)
    if form_of(file) == "parquet":
        for group, (rows, size) in enumerate(_row_groups(file)):
            parts = min(_MOST_PARTS, max(1, rows), -(-size // span_bytes) or 1)
            for number in range(parts):
                first, last = (rows * edge // parts for edge in (number, number + 1))
                yield Span(str(file), "group", first, last, size // parts, group, stamp=stamp)
        return
    size, each = stamp[0], span_bytes
    if file.suffix in COMPRESSED:
        size = _decompressed_bytes(file)
        each = max(span_bytes, -(-size // _MOST_PARTS))
    for first in range(0, size, each):
        last = min(first + each, size)
        yield Span(str(file), "lines", first, last, last - first, stamp=stamp)


def _stamp(*files: Path) -> tuple[int, int]:
    size = time = 0
    for file in files:
        try:
            found = file.stat()
        except OSError as error:
            raise unreadable(file, error) from error
        size, time = size + found.st_size, time + found.st_mtime_ns
    return size, time


def _row_groups(file: Path) -> list[tuple[int, int]]:
    """Returns the rows of each row group, and the bytes of its documents."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(file)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{file}: cannot be read as Parquet after row 0: {error}") from error
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(index) for index in range(group.num_columns))
        sizes = (one.total_uncompressed_size for one in columns if one.path_in_schema.partition(".")[0] in COLUMNS)
        found.append((group.num_rows, sum(sizes)))
    return found


def _decompressed_bytes(file: Path) -> int:
    try:
        with opened(file) as text:
            return sum(len(part) for part in iter(lambda: text.read(_BYTES), b""))
    except UNREADABLE as error:
        raise unreadable(file, error) from error


def _of_dataset(path: str, span_bytes: int) -> Iterator[Span]:
    dataset, _, part = open_dataset(path)
    chosen, size = rows_of(part, len(dataset)), max(1, int(dataset.data.nbytes))
    each = max(1, len(dataset) * span_bytes // size)
    for first in range(chosen.start, chosen.stop, each):
        last = min(first + each, chosen.stop)
        yield Span(split_path(path)[0], "dataset", first, last, size * (last - first) // len(dataset))


def _sliced(spans: Sequence[Span], part: Slice) -> Iterator[Span]:
    counts = [_rows_in(span) for span in spans]
    chosen, before = rows_of(part, sum(counts)), 0
    for span, count in zip(spans, counts, strict=True):
        first, last = max(chosen.start - before, 0), min(chosen.stop - before, count)
        if first < last:
            yield replace(span, skip=first, take=last - first, size=span.size * (last - first) // count)
        before += count


def _rows_in(span: Span) -> int:
    return span.last - span.first if span.form == "group" else sum(1 for line in _lines(span) if line.strip())


class SpanReader:
    """Reads the rows of spans, and keeps the last dataset open."""

    def __init__(self) -> None:
        self._open: tuple[str, Dataset, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}  # other processes open it themselves

    def rows(self, span: Span) -> Iterator[Row]:
        """Yields the rows of a span, each with its location. Raises UserError if they cannot be read, and if the file was changed
        since the span was made."""
        files = named_files(span.path) or () if span.form == "whole" else (Path(span.path),)
        if span.stamp is not None and (now := _stamp(*files)) != span.stamp:
            sizes = f"{now[0]:,} bytes, were {span.stamp[0]:,}" if now[0] != span.stamp[0] else "written anew"
            raise UserError(
                f"{span.path}: was changed while the run reads it ({sizes}); put it back and resume the run"
            )
        if span.form == "whole":
            return read_rows(span.path)
        if span.form == "lines":
            return _cut(_line_rows(span), span)
        if span.form == "group":
            rows = parquet_rows(Path(span.path), (), COLUMNS, span.group)
            return _cut(islice(rows, span.first, span.last), span)
        if self._open is None or self._open[0] != span.path:
            self._open = (span.path, *open_dataset(span.path)[:2])
        return dataset_rows(*self._open[1:], range(span.first, span.last))


def _cut(rows: Iterator[Row], span: Span) -> Iterator[Row]:
    return islice(rows, span.skip, None if span.take is None else span.skip + span.take)


def _line_rows(span: Span) -> Iterator[Row]:
    """Yields the rows of lines. Their numbers count from the beginning of the file, whose lines are counted only for an error."""
    for number, line in enumerate(_lines(span), start=1):
        if not line.strip():
            continue
        where = Location(span, number)
        yield where, json_object(where, line)


class Location(str):
    """The location of a line, as "a.jsonl:17", which counts the lines before its span when it is formatted."""

    def __new__(cls, span: Span, number: int) -> Location:
        made = super().__new__(cls, f"{span.path}:{number}")
        made._span, made._number = span, number
        return made

    _span: Span
    _number: int

    def __str__(self) -> str:
        return f"{self._span.path}:{_lines_before(self._span) + self._number}"

    def __format__(self, spec: str) -> str:
        return str(self)


def _lines_before(span: Span) -> int:
    before = replace(span, first=0, last=span.first)
    return sum(1 for _ in _lines(before)) if span.first else 0


def _lines(span: Span) -> Iterator[bytes]:
    """Yields the lines that begin in the bytes from `first` to `last` of a file."""
    file = Path(span.path)
    try:
        with opened(file) as text:
            at = 0
            if span.first:
                # The line that begins before `first` ends at the first line break from the byte before on.
                _skip(file, text, span.first - 1)
                at = span.first - 1 + len(text.readline())
            while at < span.last and (line := text.readline()):
                at += len(line)
                yield line
    except UNREADABLE as error:
        raise unreadable(file, error) from error


def _skip(file: Path, text: IO[bytes], count: int) -> None:
    if file.suffix not in COMPRESSED:
        text.seek(count)
        return
    while count and (read := len(text.read(min(count, _BYTES)))):
        count -= read
