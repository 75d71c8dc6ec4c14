"""What a run recorded of its starts: each with its machine, threads, device, and what a resumption changed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from nmoe.errors import UserError
from nmoe.parsing import json_of, toml_of
from nmoe.runs.checkpoint import latest_checkpoint


def recorded_threads(path: Path) -> int | None:
    """The thread count that a run last used; None if there is no such run.

    Sums are split over threads, so that only the same count gives exactly the same numbers.
    """
    if not (path / "provenance.json").exists():
        return None
    provenance = read_provenance(path)
    return [provenance, *provenance["resumed"]][-1]["threads"]


def recorded_precision(path: Path) -> Literal["float32", "bfloat16", "float16"] | None:
    """The precision of a run's config.toml; None where that has none, or cannot be read (`RunDirectory.create` says so)."""
    model = _configuration(path).get("model")
    return model.get("precision") if isinstance(model, dict) else None


def recorded_steps(path: Path) -> int | None:
    """The run.steps of a run that can go on from a checkpoint; None without one."""
    found = _recorded(path)
    return None if found is None else found["run"]["steps"]


def recorded_schedule_steps(path: Path) -> int | None:
    """The steps that the schedule of such a run takes to its lowest learning rate; None without one."""
    found = _recorded(path)
    return None if found is None else found["optimizer"].get("schedule_steps") or found["run"]["steps"]


def _recorded(path: Path) -> dict[str, Any] | None:
    """The config.toml of a run that has a checkpoint; None where it cannot be read (`RunDirectory.create` says so)."""
    if latest_checkpoint(path / "checkpoints") is None:
        return None
    found = _configuration(path)
    run, optimizer = found.get("run"), found.get("optimizer")
    return found if isinstance(run, dict) and "steps" in run and isinstance(optimizer, dict) else None


def _configuration(path: Path) -> dict[str, Any]:
    """The config.toml of a run; empty where it cannot be read."""
    try:
        return toml_of((path / "config.toml").read_text())
    except (OSError, ValueError):
        return {}


def recorded_exports(path: Path) -> str | None:
    """The checkpoint.export_directory of a run that can go on from a checkpoint; None without one."""
    found = _recorded(path) or {}
    checkpoint = found.get("checkpoint")
    return checkpoint.get("export_directory") if isinstance(checkpoint, dict) else None


def recorded_device(path: Path) -> str | None:
    """The device that a run last used; None if there is no such run."""
    if not (path / "provenance.json").exists():
        return None
    provenance = read_provenance(path)
    return [provenance, *provenance["resumed"]][-1]["device"]


def read_provenance(path: Path) -> dict[str, Any]:
    """The provenance of a run's first start, with that of each resumption in `resumed`.

    Raises UserError if the run has none, or its file is not such a record.
    """
    file = path / "provenance.json"
    try:
        record = json_of(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: missing or not JSON ({error}); put back the file the run wrote") from error
    if not isinstance(record, dict) or "resumed" not in record:
        raise UserError(f"{file}: not the provenance of a run (no 'resumed'); put back the file the run wrote")
    return record


def resumptions(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Each resumption of a run, with the keys of the configuration that it changed:
    `from step 20 at 2026-01-02T03:04:05Z, run.steps 20 -> 60`."""
    for resumed in provenance["resumed"]:
        changed = [f", {key} {_value(old)} -> {_value(new)}" for key, (old, new) in resumed.get("changed", {}).items()]
        yield f"from step {resumed['from_step']} at {resumed['started_utc']}" + "".join(changed)


def _value(value: object) -> str:
    return "absent" if value is None else json.dumps(value)
