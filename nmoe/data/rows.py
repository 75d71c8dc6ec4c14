"""Reads the rows of a dataset from files, directories or the hub: one reader for all pools and recipes.

A path names one of these, and the first that exists is read:

  1. a file: JSON lines (.jsonl), JSON (.json: an array of objects, or lines all the same), Parquet (.parquet), CSV (.csv, all
     fields texts), the texts among them also compressed (.jsonl.gz, .jsonl.zst); or several, by a pattern
     (`data/train-*.parquet`);
  2. a directory of such files as a hub repository has them, or as `Dataset.save_to_disk` writes them;
  3. either of these below $NMOE_DATASETS, where local copies of hub datasets are kept under their names (`nmoe.data.hub`):
     `hendrycks/competition_math`, which has left the hub, is then `$NMOE_DATASETS/hendrycks/competition_math/`;
  4. a dataset on the hub, or on the mirror that $HF_ENDPOINT names; a dataset downloaded once is found without a network.

`data_files` picks files of a directory or of a hub dataset; with the path "json", "parquet" or "csv", as `load_dataset` has
it, it picks local files. A part of the rows is taken by a slice behind the path, `train.jsonl@[:1024]`, or behind the split,
`train[10%:]`; its rows count from 0, blank lines left out.

A local copy that does not distinguish subsets (a file, a saved dataset, a directory without subsets) is that subset, and a
file is the split that is asked for. Code that comes with a dataset is never run.
"""

from __future__ import annotations

import csv
import difflib
import errno
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from nmoe.config.base import Slice, rows_of, split_name, split_path
from nmoe.data.hub import how_to_fetch, hub_or_cache, kept_datasets
from nmoe.data.layouts import json_word
from nmoe.errors import MissingInputError, StorageError, UserError, cut
from nmoe.parsing import json_of

if TYPE_CHECKING:
    from datasets import Dataset

Row = tuple[str, Mapping[str, Any]]
"""The location of a row, for errors ("train.jsonl:17"), and its fields."""

Form = Literal["jsonl", "json", "parquet", "csv"]

_FORMS: dict[str, Form] = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_BUILDERS: dict[str, Form] = {"json": "json", "parquet": "parquet", "csv": "csv"}  # as `load_dataset` calls them
_SAVED_MARKERS = (
    "dataset_dict.json",
    "state.json",
)  # the files by which save_to_disk marks a DatasetDict and a Dataset

COMPRESSED = (".gz", ".zst")

_MUCH_ALIKE = 0.8  # of names, as difflib measures it
_PARQUET_ROWS = 1024  # at once: as Python objects, a row of a conversation is some kilobytes
_LONGEST_FIELD = 2**31 - 1  # of a CSV; the csv module's own limit is 128 KB


def read_rows(
    path: str,
    *,
    subset: str | None = None,
    split: str = "train",
    data_files: Sequence[str] = (),
    form: Form | None = None,
    columns: Sequence[str] | None = None,
    optional: Sequence[str] = (),
) -> Iterator[Row]:
    """Yields the rows that `path` names, in order and one at a time.

    `form` is the format of a file whose name does not say it. If `columns` are given, a Parquet file is read only for these and the
    `optional` ones that it has. Raises UserError for unreadable data, with file and line or row, and StorageError when the disk is
    full.
    """
    name, part = split_path(path)
    if data_files and name in _BUILDERS:
        files, form = matching(Path(), data_files), _BUILDERS[name]
    else:
        local = _local(name, path, form)
        named = _files(name, local, form, data_files)
        if named is None:
            dataset = _load_dataset(name, subset, split, data_files, local, path)
            yield from dataset_rows(
                dataset, f"{name if local is None else local}: {split}", rows_of(part, len(dataset))
            )
            return
        files = named
    within = _file_slice(name, split)

    def rows() -> Iterator[Row]:
        for file in files:
            yield from _file_rows(file, form, columns, optional)

    yield from _sliced(lambda: _sliced(rows, within), part)


def named_files(path: str) -> list[Path] | None:
    """Returns the files that `path` names, which may end in a slice; None if it names a dataset that `open_dataset` loads."""
    name = split_path(path)[0]
    return _files(name, _local(name, path, None), None, ())


def open_dataset(path: str) -> tuple[Dataset, str, Slice]:
    """Loads the dataset that `path` names, split "train". Returns it with its name for errors and the slice of rows."""
    name, part = split_path(path)
    local = _local(name, path, None)
    return (
        _load_dataset(name, None, "train", (), local, path),
        f"{name if local is None else local}: train",
        part,
    )


def _local(name: str, path: str, form: Form | None) -> Path | None:
    """Returns the file, pattern or directory that a name means on this machine; None for a dataset on the hub."""
    local = Path(name) if form or is_pattern(name) else local_copy(name)
    if local is None and _is_path(name):
        raise MissingInputError(f"{name}: cannot be read: No such file or directory{_similar(name)}", path)
    if local is not None and (local / "config.toml").is_file() and (local / "checkpoints").is_dir():
        raise MissingInputError(f"{name}: is a run, not a dataset; name a file of rows or a dataset", path)
    return local


def _files(name: str, local: Path | None, form: Form | None, data_files: Sequence[str]) -> list[Path] | None:
    """Returns the files to read; for a dataset that `datasets` has to load, None."""
    pattern = is_pattern(name)
    if local is None or (local.is_dir() and form is None and not data_files and not pattern):
        return None
    return matching(Path(), [name]) if pattern else matching(local, data_files) if data_files else [local]


def local_copy(name: str) -> Path | None:
    """Returns the path of a file or dataset on this machine; None if there is none."""
    return next((candidate for candidate in (Path(name), kept_datasets() / name) if candidate.exists()), None)


def is_pattern(name: str) -> bool:
    """Returns whether a path has wildcards and is not the name of an existing file."""
    return any(sign in name for sign in "*?") and not Path(name).exists()


def read_lines(name: str, lines: Iterable[bytes]) -> Iterator[Row]:
    """Parses JSON lines from `name`, and yields each object with its location ("stdin:3"); blank lines are skipped. Raises
    UserError for any other line."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{name}:{number}"
            yield where, json_object(where, line)


def json_object(where: str, line: bytes) -> dict[str, object]:
    """Parses a line of a file. `where` names it in errors ("train.jsonl:17"). Raises UserError if it is not an object."""
    if line.startswith(b"version https://git-lfs"):
        raise UserError(f"{where}: a pointer of Git LFS in place of the data; fetch it with `git lfs pull`")
    try:
        # A byte order mark may stand before the first line, as some editors write it.
        value = json_of(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error}; convert the file") from error
    except json.JSONDecodeError as error:  # its line number counts within the text, and is always 1
        raise UserError(f"{where}: not JSON: {error.msg}, column {error.colno}; each line holds one object") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}; each line holds one object") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: {json_word(value)}, not an object; each line holds one object, {{...}}")
    return value


# --- files


def _is_path(name: str) -> bool:
    """Returns whether a name is more likely a file's than a hub dataset's, so that a missing file is reported as such and not
    looked for on the hub (which would take long without a network). Only the name decides, not the files around."""
    path = Path(name)
    # OpenHermes-2.5 is a dataset, train.josnl a slip of the hand.
    return (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or form_of(path) is not None
        or path.suffix[1:].isalpha()
    )


def _similar(name: str) -> str:
    """Returns the end of an error message that suggests a file with a similar name in the same directory; "" if there is none."""
    path = Path(name)
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    found = difflib.get_close_matches(path.name, beside, n=1, cutoff=_MUCH_ALIKE)
    return f"; did you mean {str(path.parent / found[0])!r}?" if found else ""


def form_of(path: Path) -> Form | None:
    """Returns the format that a file's name says; None if it says none."""
    return _FORMS.get(path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix)


def matching(directory: Path, patterns: Sequence[str]) -> list[Path]:
    """Returns the files that match the patterns, for each pattern sorted by name. Raises UserError for a pattern without a
    match."""
    found: list[Path] = []
    for pattern in patterns:
        plain = directory / pattern
        base = Path(plain.anchor) if plain.is_absolute() else Path()
        matches = [plain] if plain.is_file() else sorted(base.glob(str(plain.relative_to(base))))
        if not matches:
            named = "" if str(plain) == pattern else f" (data_files = {pattern!r})"
            raise MissingInputError(f"{plain}: no such file{named}", pattern)
        found += matches
    return found


def _file_rows(path: Path, form: Form | None, columns: Sequence[str] | None, optional: Sequence[str]) -> Iterator[Row]:
    named = form_of(path)
    if form is not None and named not in (None, form) and {form, named} & {"csv", "parquet"}:
        raise UserError(f'{path}: a {named} file, and {form} is wanted here; write type = "{named}"')
    form = form or named
    if form is None:
        raise MissingInputError(
            f"{path}: files of type {path.suffix!r} are not read; {', '.join(_FORMS)} are", str(path)
        )
    if form == "parquet":
        yield from parquet_rows(path, columns, optional)
        return
    try:
        with opened(path) as file:
            if form == "jsonl":
                yield from read_lines(str(path), file)
            elif form == "json":
                yield from _json(path, file)
            else:
                yield from _csv(path, file)
    except UNREADABLE as error:
        raise unreadable(path, error) from error


UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file may raise; an EOFError where a compressed file is cut."""


def unreadable(path: Path, error: BaseException) -> MissingInputError:
    remedy = "; name a file in it" if isinstance(error, IsADirectoryError) else ""
    return MissingInputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}{remedy}", str(path))


def opened(path: Path) -> IO[bytes]:
    """Opens a file of text, which may be compressed. Raises OSError, and so may reading."""
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _json(path: Path, file: IO[bytes]) -> Iterator[Row]:
    """Reads an array of objects or JSON lines, since many files of lines are called .json."""
    start = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    if not start.startswith(b"["):
        yield from read_lines(str(path), file)
        return
    try:
        rows = json_of(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}; convert the file") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        if not isinstance(row, dict):
            raise UserError(f"{where}: {json_word(row)}, not an object; the file is an array of objects")
        yield where, row


def _csv(path: Path, file: IO[bytes]) -> Iterator[Row]:
    """Reads a CSV file with all fields as texts, because CSV has no types and the answer 0135 is not the number 135. A row's
    location is its last line."""
    csv.field_size_limit(_LONGEST_FIELD)

    reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    header: list[str] | None = None
    try:
        for fields in reader:
            if header is None:
                header = fields
                if repeated := [name for name in dict.fromkeys(header) if name and header.count(name) > 1]:
                    raise UserError(f"{path}:1: the column {repeated[0]!r} appears twice; rename one of them")
            elif fields:
                where = f"{path}:{reader.line_num}"
                if len(fields) != len(header):
                    raise UserError(f"{where}: {len(fields)} fields, and the first line names {len(header)} columns")
                yield where, dict(zip(header, fields, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}:{reader.line_num + 1}: not CSV in UTF-8: {error}") from error


def parquet_rows(
    path: Path, columns: Sequence[str] | None, optional: Sequence[str] = (), group: int | None = None
) -> Iterator[Row]:
    """Yields the rows of a Parquet file, or of one of its row groups. Raises UserError as `read_rows` does."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            if absent := [column for column in columns or () if column not in there]:
                raise UserError(
                    f"{path}: no column {', '.join(map(repr, absent))}; the columns are {', '.join(map(repr, there))}"
                )
            wanted = None if columns is None else [*columns, *(name for name in optional if name in there)]
            number = sum(file.metadata.row_group(before).num_rows for before in range(group or 0))
            for batch in file.iter_batches(
                _PARQUET_ROWS, row_groups=None if group is None else [group], columns=wanted
            ):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", _own_keys(row)
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # a ValueError where a text is not UTF-8
        raise UserError(f"{path}: cannot be read as Parquet after row {number}: {error}") from error


def _own_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    """Removes keys that are None from the objects in a row of Arrow, which has them only because objects of other rows do."""
    return {key: _pruned(value) for key, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(one) for key, one in value.items() if one is not None}
    return [_pruned(one) for one in value] if isinstance(value, list) else value


# --- slices


def _file_slice(name: str, split: str) -> Slice:
    parsed = split_name(split)
    if parsed is None:
        raise UserError(f"{name}: a file has no split {split!r}; write a name, with a slice where wanted: train[:1024]")
    return parsed[1]


def _sliced(rows: Callable[[], Iterator[Row]], part: Slice) -> Iterator[Row]:
    """Returns the rows of a slice. A slice that counts from the end, or in percent, needs the number of rows, so that they are read
    twice."""
    if all(bound is None or bound.isdigit() for bound in part):
        start, stop = (None if bound is None else int(bound) for bound in part)
        return islice(rows(), start, stop)
    chosen = rows_of(part, sum(1 for _ in rows()))
    return islice(rows(), chosen.start, chosen.stop)


# --- datasets


def _load_dataset(
    name: str, subset: str | None, split: str, data_files: Sequence[str], local: Path | None, named: str
) -> Dataset:
    import datasets

    unreachable = None
    try:
        if local is not None:
            return _load_directory(local, subset, split)
        options: dict[str, Any] = {"data_files": list(data_files)} if data_files else {}
        with hub_or_cache() as unreachable:
            return datasets.load_dataset(name, subset, split=split, **options)
    # RuntimeError is how the library refuses a dataset that is a script.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # "An error occurred while generating the dataset": the cause says which.
        wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None
        reason = error.__cause__ if wrapped else error
        disk_full = isinstance(reason, OSError) and reason.errno == errno.ENOSPC
        said = reason if disk_full or unreachable is None else unreachable
        message = _failure(name, subset, split, local, said)
        raise (StorageError(message) if disk_full else MissingInputError(message, named)) from error


def _load_directory(path: Path, subset: str | None, split: str) -> Dataset:
    import datasets

    if any((path / marker).exists() for marker in _SAVED_MARKERS):
        return _load_saved(path, split)
    if subset is not None:
        subsets = datasets.get_dataset_config_names(str(path))
        if subset not in subsets:
            if (path / subset).is_dir():
                path, subset = path / subset, None
            elif subsets == ["default"]:
                subset = None
    return datasets.load_dataset(str(path), subset, split=split)


def _load_saved(path: Path, split: str) -> Dataset:
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        saved = {split.partition("[")[0]: saved}
    lengths = {name: len(rows) for name, rows in saved.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    selected = [saved[part.splitname].select(range(part.from_ or 0, _end(part, lengths))) for part in parts]
    return datasets.concatenate_datasets(selected)


def _end(part: Any, lengths: dict[str, int]) -> int:
    return lengths[part.splitname] if part.to is None else part.to


def dataset_rows(dataset: Dataset, where: str, chosen: range) -> Iterator[Row]:
    """Yields the chosen rows of a dataset; their locations count rows from 1, including the rows before."""
    for number, row in zip(chosen, dataset.select(chosen), strict=True):
        yield f"{where} row {number + 1}", _own_keys(row)


def _failure(name: str, subset: str | None, split: str, local: Path | None, reason: object) -> str:
    of_subset = "" if subset is None else f", subset {subset!r}"
    what = f"dataset {name!r}{of_subset}, split {split!r}"
    if local is not None:
        return f"{what}: the local copy {local} cannot be loaded: {cut(' '.join(str(reason).split()), 200)}"
    return (
        f"{what}: there is no such file or directory, nor one below $NMOE_DATASETS, and the hub did not give it: {reason}; "
        f"give the path of a local copy, {how_to_fetch(name)}, or name a mirror of the hub in $HF_ENDPOINT{_similar(name)}"
    )
