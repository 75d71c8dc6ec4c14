"""Records of a run that lie elsewhere: on another disk, say. The run's directory has a link in the place of each, by which a
resumed run, `nmoe runs show` and the report find them again."""

import os
from collections.abc import Mapping
from pathlib import Path

from nmoe.config.tables.run import RunSection
from nmoe.errors import UserError
from nmoe.runs.storage import make_directory, storage_errors

VARIABLES = {
    "metrics_directory": "METRICS_LOG_DIR",
    "samples_directory": "SAMPLES_LOG_DIR",
    "spikes_file": "SPIKE_LOG_PATH",
}
"""The keys of [run], and the environment variable that stands for each where it is not given."""


def place_records(path: Path, settings: RunSection, variables: Mapping[str, str] = os.environ) -> None:
    """Makes the links of a new run at `path`, which has an empty samples/. Links that a run has already, since it was killed before
    its first checkpoint, stay. Raises UserError where another run's records lie."""
    places = {key: getattr(settings, key) or variables.get(variable) for key, variable in VARIABLES.items()}
    targets = {
        "metrics.jsonl": (places["metrics_directory"], Path(settings.name, "metrics.jsonl")),
        "samples": (places["samples_directory"], Path(settings.name, "samples")),
        "spikes.jsonl": (places["spikes_file"], Path()),
    }
    for (name, (place, below)), key in zip(targets.items(), VARIABLES, strict=True):
        if place is not None and not (path / name).is_symlink():
            _link(path / name, Path(place).absolute() / below, key)


def refuse_missing(path: Path) -> None:
    """Raises UserError where a record of the run lies in a place that is not there now."""
    for name in ("metrics.jsonl", "samples", "spikes.jsonl"):
        link = path / name
        if link.is_symlink() and not link.exists():
            raise UserError(f"{link}: leads to {link.readlink()}, which is not there; mount its disk, or put it back")


def _link(link: Path, target: Path, key: str) -> None:
    remedy = f"choose another --run.{key}"
    directory = link.is_dir()
    if target.is_dir() != directory and target.exists():
        raise UserError(f"{target}: is {'a file' if directory else 'a directory'}; {remedy}")
    if target.exists() and (any(target.iterdir()) if directory else target.stat().st_size):
        raise UserError(f"{target}: holds the records of another run; move them, or {remedy}")
    make_directory(target if directory else target.parent, remedy)
    with storage_errors(target):
        if directory:
            link.rmdir()
        else:
            target.touch()
        link.symlink_to(target, target_is_directory=directory)
