"""What a sink is told, and what it has to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as its sinks see it: the first, or one that resumes.

    directory: the run's. name: run.name. number: 1 for the first start, and one more each time that the run is resumed.
    config: the tables of config.toml.
    project, wandb_mode: of `[sinks]`.
    rows, alerts: the records of the steps before this start, from metrics.jsonl and alerts.jsonl. A sink begins with them, so that
    it holds the whole run whatever an attempt before it left behind.
    """

    directory: Path
    name: str
    number: int
    config: Mapping[str, Any]
    project: str
    wandb_mode: str
    rows: Sequence[Mapping[str, Any]] = ()
    alerts: Sequence[Mapping[str, Any]] = ()


class Sink(Protocol):
    """Takes the metrics of a run, in the order of its steps, on its own thread. Any method may raise; the failure is
    counted."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the numbers of one step."""

    def alert(self, step: int, message: str) -> None:
        """Tells of an alert of the run."""

    def close(self) -> None:
        """Writes what is left, and lets go of files and connections."""


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl, without its `step`: an integer stays one, and text and lists are left out."""
    return {
        name: value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
