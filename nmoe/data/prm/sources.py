"""Reads labelled steps: PRM800K and Math-Shepherd by name, both together, or a file of either form or of stepwise records."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from nmoe.config.base import split_name
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.hub import hub_or_cache, not_given, why_not_asked
from nmoe.data.prm.labelled import LabelledSteps, StepDataset, settle
from nmoe.data.prm.math_shepherd import is_math_shepherd, read_math_shepherd
from nmoe.data.prm.prm800k import is_prm800k, read_prm800k
from nmoe.data.records import Stepwise, detect, read_records
from nmoe.data.rows import Row, local_copy, read_rows
from nmoe.errors import UserError

PRM800K = "tasksource/PRM800K"
"""The name of a mirror of PRM800K on the Hugging Face hub. The original is files on GitHub, github.com/openai/prm800k."""

# What copies of it are called, below $NMOE_DATASETS or here: of the mirror, and of the repository on GitHub.
_COPIES = (PRM800K, "openai/prm800k", "prm800k")
# Where the files of both phases lie below the directory of a copy.
_FOLDERS = ("", "data", "prm800k", "prm800k/data", "prm800k/prm800k/data")
_PHASES = ("phase1_{split}.jsonl", "phase2_{split}.jsonl")


def read_source(source: str, split: str, prm800k: str, math_shepherd: str, neutral_is: str | None) -> StepDataset:
    """Reads the labelled steps of a source: "prm800k", "math_shepherd", "both" or a file, directory or hub name. Contradicting
    labels are removed (`settle`).

    `prm800k` and `math_shepherd` are the paths or hub names of these datasets. Raises UserError for records that cannot be read,
    with file and line for a record of another form, and if no labelled step is left.
    """
    reading = StepDataset()
    if source in ("prm800k", "both"):
        reading.add(read_prm800k(_prm800k_rows(prm800k, split)))
    if source in ("math_shepherd", "both"):
        reading.add(read_math_shepherd(read_rows(math_shepherd, split=split)))
    if source not in ("prm800k", "math_shepherd", "both"):
        reading.add(read_labelled(source, split))
    reading = settle(reading, neutral_is)
    if not reading.solutions:
        counts = "; ".join(f"{count:,} {reason}" for reason, count in reading.dropped.items()) or "no records"
        raise UserError(f"{source}, split {split!r}: no labelled step is left to train on (dropped: {counts})")
    return reading


def read_labelled(path: str, split: str) -> StepDataset:
    """Reads the labelled steps of a file, directory or hub name, in the form that its first record has."""
    if path in _COPIES or ((local := local_copy(path)) is not None and local.is_dir() and _phase_files(local, split)):
        return read_prm800k(_prm800k_rows(path, split))
    rows = read_rows(path, split=split)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}, split {split!r}: no records")
    rows = chain([first], rows)
    if is_prm800k(first[1]):
        return read_prm800k(rows)
    if is_math_shepherd(first[1]):
        return read_math_shepherd(rows)
    if not detect(list(first[1]), ("stepwise",)):
        raise UserError(
            f"{first[0]}: has no format of labelled steps: PRM800K (question, label), Math-Shepherd (input with its tags, label), "
            f"stepwise (prompt, completions, labels); its fields are {', '.join(map(repr, first[1])) or 'none'}"
        )
    return _read_stepwise(path, split)


def _read_stepwise(path: str, split: str) -> StepDataset:
    """Reads stepwise records. They do not say whether they solve the problem: a record without a wrong step counts as one that
    does."""
    reading = StepDataset()
    for record in read_records(DatasetSettings(path=path, split=split), ("stepwise",)):
        assert isinstance(record, Stepwise), "only that kind is accepted"
        reading.records += 1
        problem = "\n\n".join(message.content for message in record.prompt if message.role != "system")
        end = record.labels.index("-") + 1 if "-" in record.labels else len(record.steps)
        reading.dropped["steps after the first wrong one"] += len(record.steps) - end
        solution = LabelledSteps.of_record(
            problem,
            record.steps[:end],
            record.labels[:end],
            "-" not in record.labels,
            record.where,
            rest=record.steps[end:],
        )
        reading.solutions.append(solution)
    reading.dropped = +reading.dropped
    return reading


def _prm800k_rows(path: str, split: str) -> Iterator[Row]:
    """Reads the rows of PRM800K: both phases, one after the other, if `path` has the files of the dataset's repository; otherwise
    `path` itself.

    The dataset's usual names stand for a copy on this machine, of the mirror or of the repository, else for the mirror.
    """
    if path in _COPIES:
        path = next((name for name in _COPIES if local_copy(name) is not None), None) or _fetched()
    local = local_copy(path)
    files = _phase_files(local, split) if local is not None and local.is_dir() else []
    if local is not None and not files and (others := sorted(local.rglob("phase[12]_*.jsonl"))):
        there = ", ".join(str(file.relative_to(local)) for file in others)
        raise UserError(f"{local}, split {split!r}: no file of either phase for that split; there are {there}")
    return read_rows(path, split=split, data_files=files)


def _fetched() -> str:
    """Fetches the mirror's files from the hub, and returns their directory in the hub's cache. Returns the mirror's name if it has
    no such files, or if the hub is not asked and its cache lacks them (the datasets library has its own cache). Raises UserError if
    the hub does not provide them.

    The JSON-lines files are read directly, because types that the datasets library would guess from some records differ in others.
    """
    from huggingface_hub import snapshot_download

    try:
        with hub_or_cache():
            directory = snapshot_download(PRM800K, repo_type="dataset", allow_patterns=["*phase[12]_*.jsonl"])
    except Exception as error:  # the hub's client raises many kinds
        if why_not_asked() is not None:
            return PRM800K
        raise UserError(not_given(PRM800K, error)) from error
    return directory if any(Path(directory).rglob("phase[12]_*.jsonl")) else PRM800K


def _phase_files(directory: Path, split: str) -> list[str]:
    named = split_name(split)
    names = [name.format(split=named[0]) for name in _PHASES] if named is not None else []
    for folder in _FOLDERS:
        if found := [f"{folder}/{name}".lstrip("/") for name in names if (directory / folder / name).is_file()]:
            return found
    return []
