"""The journal of a run that samples beside its training: in which order groups were issued, arrived and ended, and which version of
the weights sampled each of their tokens.

Seeds, problems and weights are functions of the configuration, but these depend on how fast the engines are. With them the run can
be executed again to the same weights (`nmoe replay RUN --train`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.rollout.bundle import tool_event
from nmoe.rollout.episode import Episode
from nmoe.runs.storage import append_whole, storage_errors
from nmoe.trajectory import Group, Trajectory
from nmoe.types import ToolEvent

FILE = "journal.jsonl"

Spans = tuple[tuple[int, int], ...]
"""How many tokens each version of the weights sampled, in their order: ((3, 120), (4, 17)). None at all: no engine sampled them."""


def spans_of(versions: Sequence[int]) -> Spans:
    """Returns the versions of consecutive tokens as spans."""
    return tuple((version, len([*same])) for version, same in groupby(versions))


class Journal:
    """Appends to the journal in a run's directory. A line is there wholly or not at all, unless the process is killed while it is
    written; `begin` removes such a last line. Every method raises StorageError where the disk is full."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def begin(self, step: int, ranks: int = 1) -> None:
        """A process, or so many `ranks`, goes on after `step` steps, 0 or its checkpoint's: the later steps of the journal are
        superseded, and outstanding groups are issued anew."""
        if self._path.exists():
            with storage_errors(self._path):
                os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        self._append(event="begin", step=step, ranks=ranks)

    def issue(self, step: int, version: int, positions: Sequence[int]) -> None:
        """Groups are issued during `step`, while the learner is at `version`."""
        self._append(event="issue", step=step, version=version, positions=[*positions])

    def arrive(self, step: int, position: int, group: Group) -> None:
        """A group came. Calls in order of arrival say which group the loop saw first."""
        of = {trajectory.index: trajectory for trajectory in group.trajectories}
        spans = {
            f"{index}/{number}": spans_of(turn.sample.versions)
            for index, trajectory in of.items()
            for number, turn in enumerate(trajectory.turns)
        }
        tools = {index: _tools(trajectory) for index, trajectory in of.items() if trajectory.tool_events}
        late = [index for index, trajectory in of.items() if trajectory.grade.failure == "timeout"]
        self._append(
            event="arrive",
            step=step,
            position=position,
            spans=spans,
            **({"tools": tools} if tools else {}),
            **({"timeouts": late} if late else {}),
        )

    def end(self, step: int, position: int, reason: str) -> None:
        """A group is void: it is not trained on."""
        self._append(event="end", step=step, position=position, reason=reason)

    def train(self, step: int, positions: Sequence[int]) -> None:
        """The step trains on these groups."""
        self._append(event="train", step=step, positions=[*positions])

    def publish(self, version: int) -> None:
        """The engines have these weights."""
        self._append(event="publish", version=version)

    def fault(self, engine: int, what: str) -> None:
        """An engine failed. A replay does not need it: a request counts as the engine sampled it that answered."""
        self._append(event="fault", engine=engine, what=what)

    def _append(self, **event: Any) -> None:
        append_whole(self._path, json.dumps(event, allow_nan=False).encode("ascii") + b"\n")


def _tools(trajectory: Trajectory) -> list[dict[str, Any]]:
    return [event.record() for event in trajectory.tool_events]


@dataclass(frozen=True)
class Arrival:
    """What the journal has of a group that came: the spans of each request, by sample and turn, the results of each sample's tools
    in their order, and the samples whose time was up."""

    spans: Mapping[tuple[int, int], Spans]
    tools: Mapping[int, Sequence[Mapping[str, Any]]]
    timeouts: frozenset[int]


@dataclass(frozen=True)
class Recorded:
    """The events that are in force, in their order, and the groups that came by position. `begins` counts the starts of the run,
    superseded ones too; `ranks` is the largest number of ranks that trained."""

    events: Sequence[Mapping[str, Any]]
    arrivals: Mapping[int, Arrival]
    begins: int
    ranks: int

    def answers(self, episode: Episode) -> tuple[list[ToolEvent], bool]:
        """Returns the results of the tools that an episode's last turn calls, and whether its time was up then."""
        arrival, turn = self.arrivals[int(episode.key[-1])], len(episode.turns) - 1
        events = [tool_event(one) for one in arrival.tools.get(episode.index, ())]
        late = episode.index in arrival.timeouts and (episode.index, turn + 1) not in arrival.spans
        return [event for event in events if event.call.call_id.startswith(f"{turn}/")], late


def read_journal(directory: Path) -> Recorded:
    """Reads the journal of a run, without what a later process superseded. A last line that a kill cut off is left out.

    Raises UserError, naming the file and the line, for a line that is damaged, and if there is no journal.
    """
    path = directory / FILE
    if not path.exists():
        raise UserError(f"{path}: there is no journal; only a run with async.max_staleness above 0 writes one")
    *lines, _torn = path.read_bytes().split(b"\n")
    events: list[dict[str, Any]] = []
    begins, ranks = 0, 1
    for number, line in enumerate(lines, start=1):
        try:
            event = _checked(json_of(line))
            if number == 1 and event["event"] != "begin":
                raise ValueError("it does not begin with a start of the run")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            shown = line[:80].decode(errors="replace")
            raise UserError(
                f"{path}:{number}: not an event of a journal ({error}): {shown!r}; the run can't be replayed without it"
            ) from None
        if event["event"] == "begin":
            begins, ranks = begins + 1, max(ranks, event["ranks"])
            events = _in_force(events, event["step"])
        events.append(event)
    if not events:
        raise UserError(f"{path}: the journal is empty: the run had not begun to sample")
    return Recorded(
        events, {one["position"]: _arrival(one) for one in events if one["event"] == "arrive"}, begins, ranks
    )


def _in_force(events: Sequence[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Returns the events that a start after `step` leaves in force: the steps until then, without the groups that were outstanding,
    since they are issued anew."""
    kept = [event for event in events if event.get("step", 0) <= step]
    ended = {one for event in kept if event["event"] in ("train", "end") for one in _positions(event)}
    left = []
    for event in kept:
        if event["event"] in ("issue", "arrive"):
            positions = [one for one in _positions(event) if one in ended]
            if not positions:
                continue
            event = event | {"positions": positions} if event["event"] == "issue" else event
        left.append(event)
    return left


def _positions(event: Mapping[str, Any]) -> list[int]:
    return [event["position"]] if "position" in event else event["positions"]


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _wholes(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole, value))


_STEP: dict[str, Callable[[Any], bool]] = {"step": _whole}
_ENTRIES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "begin": {**_STEP, "ranks": _whole},
    "issue": {**_STEP, "version": _whole, "positions": _wholes},
    "arrive": {**_STEP, "position": _whole},
    "end": {**_STEP, "position": _whole, "reason": lambda value: isinstance(value, str)},
    "train": {**_STEP, "positions": _wholes},
    "publish": {"version": _whole},
    "fault": {"engine": _whole},
}


def _checked(event: Any) -> dict[str, Any]:
    if not isinstance(event, dict) or event.get("event") not in _ENTRIES:
        raise ValueError("no such event")
    for name, fits in _ENTRIES[event["event"]].items():
        if not fits(event.get(name)):
            raise ValueError(f"its {name} is {event.get(name)!r}")
    if event["event"] == "arrive":
        _arrival(event)
    return event


def _arrival(event: Mapping[str, Any]) -> Arrival:
    spans: dict[tuple[int, int], Spans] = {}
    for name, pairs in event["spans"].items():
        index, turn = map(int, name.split("/"))
        spans[index, turn] = tuple((version, count) for version, count in pairs)
        if not all(_whole(version) and _whole(count) and count for version, count in spans[index, turn]):
            raise ValueError(f"its spans of {name} are {pairs!r}")
    tools = {int(index): tuple(dict(one) for one in events) for index, events in event.get("tools", {}).items()}
    return Arrival(spans, tools, frozenset(event.get("timeouts", ())))
