"""Reads the Parquet files of a source, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmoe.data.hub import download, is_hub_name
from nmoe.data.rows import is_pattern, local_copy, matching
from nmoe.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_ROWS = 4096  # at once: as Arrow and Python objects, a problem with its solution is some kilobytes


def parquet_files(path: str) -> list[Path]:
    """Returns the Parquet files that `path` names: a file, a pattern, a directory (its training split, if file names distinguish
    splits), or a dataset on the hub, which is fetched unless there is a local copy. Raises UserError if there is no such file."""
    if is_pattern(path):
        return matching(Path(), [path])
    found = local_copy(path)
    if found is None and is_hub_name(path) and path.count("/") == 1 and not Path(path).parent.exists():
        found = download(path, ["*.parquet"])
    if found is None:
        raise UserError(f"{path}: no such file or directory, and not the name of a dataset on the hub")
    if found.is_file():
        return [found]
    files = sorted(found.rglob("*.parquet"))
    training = [file for file in files if file.name.startswith("train")]
    if not files:
        raise UserError(f"{found}: no Parquet file in this directory")
    return training or files


def read_batches(files: Sequence[Path], columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
    """Yields the rows of all files in order, in batches, with each column as text and "" for a missing value. Raises UserError for
    a file that is not Parquet, and for one that lacks a column, naming the missing and the present ones."""
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet

    for path in files:
        try:
            with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
                there = file.schema_arrow.names
                if absent := [column for column in columns if column not in there]:
                    raise UserError(
                        f"{path}: no column {', '.join(map(repr, absent))}; the columns are {', '.join(map(repr, there))}"
                    )
                for batch in file.iter_batches(_ROWS, columns=list(columns)):
                    texts = [
                        pyarrow.compute.fill_null(batch.column(column).cast(pyarrow.string()), "") for column in columns
                    ]
                    yield pyarrow.record_batch(texts, names=list(columns))
        except (OSError, ValueError, pyarrow.ArrowException) as error:  # a ValueError where a text is not UTF-8
            raise UserError(f"{path}: cannot be read as Parquet: {error}") from error
