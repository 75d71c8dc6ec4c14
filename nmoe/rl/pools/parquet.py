"""Parquet files: the columns a pool needs, row by row; rows count from 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nmoe.errors import UserError
from nmoe.rl.pools.records import Record


def read_parquet(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Record]:
    """The rows of a file, in order, with `columns` and those of `optional` that are there alone. Raises UserError for what can
    not be read."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            if absent := [column for column in columns if column not in there]:
                raise UserError(
                    f"{path}: no column {', '.join(map(repr, absent))}; the columns are {', '.join(map(repr, there))}"
                )
            for batch in file.iter_batches(columns=[*columns, *(name for name in optional if name in there)]):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: can not be read as Parquet after row {number}: {error}") from error
