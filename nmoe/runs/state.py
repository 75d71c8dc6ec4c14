"""The state of a run in a checkpoint. Every part of it is saved in one way: it writes its files, and returns the rest as JSON.

state.json holds that rest by the name of the part, as `{"learner": {"version": 3}, "environment": {"position": 12}}`. Checkpoints
from before that have a few of its keys at the top; they load too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nmoe.errors import UserError

STATE = "state.json"

# Keys at the top of older files: the part that each belongs to, under the same name.
_MOVED = {"version": "learner", "position": "examples", "documents": "examples"}


class Part(Protocol):
    """A part of a run that a checkpoint holds: the learner, say, or the position in the data."""

    def save(self, directory: Path) -> Any:
        """Writes its files into `directory`, and returns what else it needs as JSON has it; None if nothing."""

    def load(self, directory: Path, state: Any) -> None:
        """Continues from what `save` wrote and returned. Raises UserError if that does not fit. `state` is None for a part of an
        older checkpoint that had none."""


@dataclass(frozen=True)
class JsonPart:
    """A part without files: `JsonPart(environment.state, environment.load_state)`."""

    read: Callable[[], Any]
    write: Callable[[Any], None]

    def save(self, directory: Path) -> Any:
        return self.read()

    def load(self, directory: Path, state: Any) -> None:
        self.write(state)


@dataclass(frozen=True)
class Files:
    """Files that the run never reads back, such as the tokenizer's: with them a checkpoint is a model that others load."""

    write: Callable[[Path], None]

    def save(self, directory: Path) -> None:
        self.write(directory)

    def load(self, directory: Path, state: Any) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Subdirectory:
    """Parts in a subdirectory of their own, such as a second model's."""

    name: str
    parts: Mapping[str, Part]

    def save(self, directory: Path) -> None:
        (directory / self.name).mkdir()
        save_parts(directory / self.name, self.parts)

    def load(self, directory: Path, state: Any) -> None:
        load_parts(directory / self.name, self.parts)


def save_parts(directory: Path, parts: Mapping[str, Part]) -> None:
    """Saves the parts into an empty directory, with state.json."""
    state = {name: part.save(directory) for name, part in parts.items()}
    (directory / STATE).write_text(json.dumps({name: one for name, one in state.items() if one is not None}) + "\n")


def load_parts(directory: Path, parts: Mapping[str, Part]) -> None:
    """Loads the parts from what `save_parts` wrote. Raises UserError if something does not fit."""
    state = _read(directory)
    for name, part in parts.items():
        if isinstance(part, JsonPart) and name not in state:
            raise UserError(
                f"{directory / STATE}: holds nothing of this run's {name}; resume with the settings the run began with"
            )
        part.load(directory, state.get(name))


def saved_version(directory: Path) -> int | None:
    """The version of the weights in a checkpoint, None where it does not say."""
    version: int | None = _read(directory).get("learner", {}).get("version")
    return version


def _read(directory: Path) -> dict[str, Any]:
    path = directory / STATE
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for key, part in _MOVED.items():
        if key in state:
            state.setdefault(part, {})[key] = state.pop(key)
    return state
