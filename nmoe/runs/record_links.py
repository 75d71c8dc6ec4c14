"""Puts records of a run on another disk. The run's directory has a link to each, by which a resumed run, `nmoe runs show` and the
report find them."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from nmoe.config.tables.run import RunSection
from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs.provenance import read_provenance
from nmoe.runs.storage import make_directory, storage_errors, write_atomically

_MARKER = ".run.json"
LINKED = ("metrics.jsonl", "samples", "spikes.jsonl")
"""The records of a run that may be on another disk."""
VARIABLES = {
    "metrics_directory": "METRICS_LOG_DIR",
    "samples_directory": "SAMPLES_LOG_DIR",
    "spikes_file": "SPIKE_LOG_PATH",
}
"""Settings of [run] that put records elsewhere, and the environment variable that each is read from if it is not set."""


def link_records(path: Path, settings: RunSection, variables: Mapping[str, str] = os.environ) -> None:
    """Creates the files and directories on other disks that the settings or variables name for a new run, and links to them at
    `path`, which has an empty samples/. An empty variable counts as unset, and a target that is the record's usual path in the
    run's directory gets no link. Existing links, from a start that was killed before its first checkpoint, are kept.

    Raises UserError if a target exists, with another run's records, with something else or empty, and if it is any other path in
    the run's directory; StorageError. All links and targets made here are then removed, but not the targets' parent directories.
    """
    targets = {
        "metrics_directory": ("metrics.jsonl", Path(settings.name, "metrics.jsonl")),
        "samples_directory": ("samples", Path(settings.name, "samples")),
        "spikes_file": ("spikes.jsonl", Path()),
    }
    with ExitStack() as undo:
        for key, (name, below) in targets.items():
            given, variable = getattr(settings, key), VARIABLES[key]
            directory = given or variables.get(variable)
            if directory and not (link := path / name).is_symlink():
                target = Path(directory).absolute() / below
                if target.resolve() != link.resolve():
                    by_variable = "" if given else f"change the variable {variable}, or "
                    _link(link, target, f"{by_variable}choose another --run.{key}", undo)
        undo.pop_all()


def claim_exports(run: Path, exports: Path) -> None:
    """Marks a directory as belonging to a run's exported checkpoints, since a save replaces and prunes checkpoints of the same
    name.

    Raises UserError if another run has marked the directory, or has left checkpoints there, and StorageError.
    """
    marker, remedy = exports / _MARKER, "choose another --checkpoint.export_directory or --run.name"
    start = read_provenance(run) | {"resumed": []}
    mark = {"run": str(run.resolve()), "start": hashlib.sha256(json.dumps(start).encode()).hexdigest()}
    saved = any(exports.glob("step_*"))
    try:
        found = json_of(marker.read_text())
        marked = {"run": found["run"], "start": found["start"]}
    except (OSError, ValueError, KeyError, TypeError):
        marked = {}
    # A run that began again, before its first checkpoint, has exported nothing.
    again = not saved and marked.get("run") in (None, mark["run"])
    if not (again or marked.get("start") == mark["start"]):
        raise UserError(f"{exports}: holds the exported checkpoints of another run; move them, or {remedy}")
    with storage_errors(exports):
        make_directory(exports, remedy)
    write_atomically(marker, (json.dumps(mark) + "\n").encode())


def refuse_missing(path: Path) -> None:
    """Raises UserError if a record's link points to a target that does not exist now."""
    for name in LINKED:
        if is_lost(link := path / name):
            raise UserError(f"{link}: leads to {link.readlink()}, which is not there; mount its disk, or put it back")


def is_lost(link: Path) -> bool:
    """Returns whether this is a link whose target does not exist now."""
    return link.is_symlink() and not link.exists()


def remove_links(path: Path) -> None:
    """Removes the links of a run that has trained nothing, and their (empty) targets, so that the run may begin again with other
    ones."""
    for name in LINKED:
        if not (link := path / name).is_symlink():
            continue
        target = link.resolve()
        link.unlink()
        if target.is_dir():
            with suppress(OSError):  # something else lies there
                target.rmdir()
            link.mkdir()
        else:
            target.unlink()


def _link(link: Path, target: Path, remedy: str, undo: ExitStack) -> None:
    directory = link.is_dir()
    if target.resolve().is_relative_to(link.parent.resolve()):
        raise UserError(f"{target}: lies in the directory of the run itself; {remedy}")
    if target.is_dir() != directory and target.exists():
        raise UserError(f"{target}: is {'a file' if directory else 'a directory'}; {remedy}")
    if target.exists() and (any(target.iterdir()) if directory else target.stat().st_size):
        if not _holds_records(target):
            raise UserError(
                f"{target}: is there already, and holds something other than the records of a run; {remedy}"
            )
        raise UserError(f"{target}: holds the records of another run; move them, or {remedy}")
    if target.is_dir() or target.is_file():
        # Nothing yet, but two runs that write one file would cut each other's lines when they are resumed.
        raise UserError(
            f"{target}: is there already, as another run that begins would leave it; remove it, or {remedy}"
        )
    with storage_errors(target):
        make_directory(target.parent, remedy)
        if directory:
            target.mkdir()
            undo.callback(target.rmdir)
            link.rmdir()
            undo.callback(link.mkdir)  # without samples/ the run could not begin again
        elif not target.exists():
            target.touch(exist_ok=False)
            undo.callback(target.unlink)
        link.symlink_to(target, target_is_directory=directory)
        undo.callback(link.unlink)


def _holds_records(target: Path) -> bool:
    """Returns whether the target holds a run's records: samples of steps, or a file whose first line is the record of a step."""
    if target.is_dir():
        return any(target.glob("step_*.jsonl"))
    try:
        with target.open() as lines:
            return "step" in json.loads(lines.readline())
    except (OSError, ValueError, TypeError):
        return False
