"""Parts of a run in a checkpoint: what they wrote and returned is what they load."""

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe.errors import UserError
from nmoe.model.snapshot import Snapshot
from nmoe.runs.state import Files, JsonPart, Subdirectory, load_parts, saved_version, snapshot_parts


class Weights:
    """A part with a file and a version."""

    def __init__(self, weight: str, version: int) -> None:
        self.weight, self.version = weight, version

    def snapshot(self, copied: bool) -> Snapshot:
        weight = self.weight
        return Snapshot(
            lambda directory: (directory / "weights").write_text(weight) and None, 4, {"version": self.version}
        )

    def load(self, directory: Path, state: Any) -> None:
        self.weight = (directory / "weights").read_text()
        if state is not None:
            self.version = state["version"]


def parts(policy: Weights, critic: Weights, place: dict[str, int]) -> dict[str, Any]:
    return {
        "learner": policy,
        "tokenizer": Files(lambda directory: (directory / "vocabulary").write_text("a b") and None),
        "critic": Subdirectory("critic", {"learner": critic}),
        "place": JsonPart(lambda: place, place.update),
    }


def test_parts_come_back_as_they_were(tmp_path: Path) -> None:
    place = {"at": 7}
    taken = snapshot_parts(parts(Weights("p", 3), Weights("c", 5), place), copied=True)
    place["at"] = 8  # what happens between the snapshot and its writing is not in it
    assert taken.size == 8
    taken.write(tmp_path)
    assert json.loads((tmp_path / "state.json").read_text()) == {"learner": {"version": 3}, "place": {"at": 7}}
    assert (tmp_path / "vocabulary").read_text() == "a b"
    policy, critic, place = Weights("", 0), Weights("", 0), {"at": 0}
    load_parts(tmp_path, parts(policy, critic, place))
    assert (policy.weight, policy.version, critic.weight, critic.version, place) == ("p", 3, "c", 5, {"at": 7})
    assert (saved_version(tmp_path), saved_version(tmp_path / "critic")) == (3, 5)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    snapshot_parts({"learner": Weights("p", 1)}, copied=False).write(tmp_path)
    with pytest.raises(UserError, match=r"state\.json: holds nothing of this run's focus"):
        load_parts(tmp_path, {"learner": Weights("", 0), "focus": JsonPart(dict, lambda state: None)})
