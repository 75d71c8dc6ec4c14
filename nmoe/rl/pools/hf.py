"""Hugging Face datasets: a local directory or file, or a name on the hub.

`dataset` is looked for in this order, and the first that exists is used:

  1. as a path: a `.jsonl`, `.json`, `.parquet` or `.csv` file, or a directory of such files, as a hub repository has
     them or as `Dataset.save_to_disk` writes them;
  2. as a directory of that name below $NMOE_DATASETS, where copies of hub datasets can be kept under their own names:
     `hendrycks/competition_math`, which has left the hub, is then `$NMOE_DATASETS/hendrycks/competition_math/`;
  3. on the hub, or on the mirror that $HF_ENDPOINT names; what was downloaded once is found without a network.

A local copy in which subsets are not told apart (a file, a saved dataset, a directory without subsets) is that subset.
A file is the split that is asked for. Code that comes with a dataset is never run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe.config.environment import HubPool
from nmoe.errors import StorageError, UserError
from nmoe.rl.pools.records import Record

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_SAVED_MARKERS = ("dataset_dict.json", "state.json")  # what save_to_disk leaves beside a DatasetDict and a Dataset


def read_hf(settings: HubPool) -> Iterator[Record]:
    """The rows of the split, counted from 1.

    Raises UserError that says what was tried when it can not be loaded, StorageError when the disk is full.
    """
    import datasets

    local = local_copy(settings.dataset)
    try:
        dataset = _load_hub(settings) if local is None else _load_local(settings, local)
    # RuntimeError is how the library refuses a dataset that is a script.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # "An error occurred while generating the dataset": what it was is in the cause.
        wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None
        reason = error.__cause__ if wrapped else error
        disk_full = isinstance(reason, OSError) and reason.errno == errno.ENOSPC
        raise (StorageError if disk_full else UserError)(_failure(settings, local, reason)) from error
    if settings.max_examples is not None:
        dataset = dataset.select(range(min(settings.max_examples, len(dataset))))
    where = settings.dataset if local is None else str(local)
    for number, row in enumerate(dataset, start=1):
        yield f"{where}: {settings.split} row {number}", row


def local_copy(name: str) -> Path | None:
    """Where a dataset lies on this machine, by the first two of the places above."""
    kept = os.environ.get("NMOE_DATASETS")
    candidates = [Path(name)] + ([Path(kept, name)] if kept else [])
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _load_hub(settings: HubPool) -> Dataset:
    import datasets

    return datasets.load_dataset(settings.dataset, settings.subset, split=settings.split)


def _load_local(settings: HubPool, path: Path) -> Dataset:
    import datasets

    if path.is_file():
        return _load_file(settings, path)
    if any((path / marker).exists() for marker in _SAVED_MARKERS):
        return _load_saved(settings, path)
    subset = settings.subset
    if subset is not None:
        subsets = datasets.get_dataset_config_names(str(path))
        if subset not in subsets:
            if (path / subset).is_dir():
                path, subset = path / subset, None
            elif subsets == ["default"]:
                subset = None
    return datasets.load_dataset(str(path), subset, split=settings.split)


def _load_file(settings: HubPool, path: Path) -> Dataset:
    import datasets

    builder = _BUILDERS.get(path.suffix)
    if builder is None:
        raise ValueError(f"files of type {path.suffix!r} are not read; {', '.join(_BUILDERS)} are")
    options: dict[str, Any] = {}
    if builder == "csv":
        # CSV has no types: without this, the answer 0135 would be read as the number 135.
        options["converters"] = {settings.problem_field: str, settings.answer_field: str}
    split_name = settings.split.partition("[")[0]
    return datasets.load_dataset(builder, data_files={split_name: str(path)}, split=settings.split, **options)


def _load_saved(settings: HubPool, path: Path) -> Dataset:
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        saved = {settings.split.partition("[")[0]: saved}
    lengths = {name: len(split) for name, split in saved.items()}
    parts = datasets.ReadInstruction.from_spec(settings.split).to_absolute(lengths)
    selected = [saved[part.splitname].select(range(part.from_ or 0, _end(part, lengths))) for part in parts]
    return datasets.concatenate_datasets(selected)


def _end(part: Any, lengths: dict[str, int]) -> int:
    return lengths[part.splitname] if part.to is None else part.to


def _failure(settings: HubPool, local: Path | None, reason: BaseException | None) -> str:
    subset = "" if settings.subset is None else f", subset {settings.subset!r}"
    what = f"dataset {settings.dataset!r}{subset}, split {settings.split!r}"
    if local is not None:
        return f"{what}: the local copy {local} can not be loaded: {reason}"
    return (
        f"{what}: there is no such file or directory, nor one below $NMOE_DATASETS, and the hub did not give it: {reason}; "
        "set `dataset` to the path of a local copy, put a copy below the directory that $NMOE_DATASETS names, or name a "
        "mirror of the hub in $HF_ENDPOINT"
    )
