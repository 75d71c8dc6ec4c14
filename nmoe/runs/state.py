"""Saves and loads the state of a run in a checkpoint, which consists of parts such as the learner and the position in the data.

Each part gives a snapshot: files, and other state as JSON. state.json holds the latter by the name of the part, as
`{"learner": {"version": 3}, "environment": {"position": 12}}`. No RNG state is saved: every draw is a function of the
seed and the position of its problem, sample or token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nmoe.errors import UserError
from nmoe.model.snapshot import Snapshot
from nmoe.parsing import json_of

STATE = "state.json"


class Part(Protocol):
    """A part of a run's state that a checkpoint holds, such as the learner or the position in the data."""

    def snapshot(self, copied: bool) -> Snapshot:
        """Returns the part's present state. With `copied` later changes do not affect it, so that a thread can write it; otherwise
        it has to be written before anything else happens."""

    def load(self, directory: Path, state: Any) -> None:
        """Restores the part from the files and the `state` of a snapshot (None if the snapshot has none). Raises UserError if they
        do not fit."""


@dataclass(frozen=True)
class JsonPart:
    """A part of a run's state without files, which JSON can express: `JsonPart(environment.state, environment.load_state)`."""

    read: Callable[[], Any]
    write: Callable[[Any], None]

    def snapshot(self, copied: bool) -> Snapshot:
        return Snapshot(lambda directory: None, state=self.read())

    def load(self, directory: Path, state: Any) -> None:
        self.write(state)


@dataclass(frozen=True)
class Files:
    """Files of a checkpoint that never change and that the run never reads back, such as the tokenizer's.

    They make a checkpoint a complete model for other programs.
    """

    write: Callable[[Path], None]

    def snapshot(self, copied: bool) -> Snapshot:
        return Snapshot(self.write)

    def load(self, directory: Path, state: Any) -> None:
        """Does nothing, because the run does not need these files."""


@dataclass(frozen=True)
class Subdirectory:
    """Parts of a run's state that are saved in a subdirectory of the checkpoint, such as a second model."""

    name: str
    parts: Mapping[str, Part]

    def snapshot(self, copied: bool) -> Snapshot:
        inner = snapshot_parts(self.parts, copied)

        def write(directory: Path) -> None:
            (directory / self.name).mkdir()
            inner.write(directory / self.name)

        return Snapshot(write, inner.size, start=inner.start)

    def load(self, directory: Path, state: Any) -> None:
        load_parts(directory / self.name, self.parts)


def snapshot_parts(parts: Mapping[str, Part], copied: bool) -> Snapshot:
    """Returns one snapshot of all parts of a run's state; it is written into an empty directory, with state.json.

    `copied` is as in `Part.snapshot`.
    """
    taken = {name: part.snapshot(copied) for name, part in parts.items()}
    # As text, since a part may return an object that it changes later.
    state = json.dumps({name: one.state for name, one in taken.items() if one.state is not None}) + "\n"

    def start(path: Path) -> None:
        for name, one in taken.items():
            one.start(path.with_name(f"{path.name}.{name}"))

    def write(directory: Path) -> None:
        for one in taken.values():
            one.write(directory)
        (directory / STATE).write_text(state)

    return Snapshot(write, sum(one.size for one in taken.values()), start=start)


def load_parts(directory: Path, parts: Mapping[str, Part]) -> None:
    """Restores all parts of a run's state from a checkpoint's directory. Raises UserError if a part does not fit."""
    state = _read(directory)
    for name, part in parts.items():
        if isinstance(part, JsonPart) and name not in state:
            raise UserError(
                f"{directory / STATE}: holds nothing of this run's {name}; resume with the settings and the version of nmoe that "
                "the run began with"
            )
        part.load(directory, state.get(name))


def saved_version(directory: Path) -> int | None:
    """Returns the version number of the weights in a checkpoint; None if it has none."""
    version: int | None = _read(directory).get("learner", {}).get("version")
    return version


def _read(directory: Path) -> dict[str, Any]:
    path = directory / STATE
    state: dict[str, Any] = json_of(path.read_text()) if path.exists() else {}
    return state
