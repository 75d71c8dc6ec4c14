"""What trainer and engines of an asynchronous run did when, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

WAITS, TRAINS, PUBLISHES = "waits for groups", "trains", "publishes"
BUSY, IDLE = "engines have requests", "engines wait for requests"
# What the trainer did, in the order of a step, with the metric of its seconds.
_DID = (("trainer_wait_s", WAITS), ("time_learn_s", TRAINS), ("time_sync_s", PUBLISHES))
METRICS = ("time_step_s", "engine_idle_share", *(name for name, _ in _DID))


class Bar(NamedTuple):
    """Seconds of a step, from the beginning of the first one: `Bar("trainer", 1, 0.0, 3.0, "waits for groups")`."""

    lane: str
    step: int
    begin: float
    end: float
    doing: str


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Returns what trainer and engines did in these steps, from their metrics; empty for a run that does not sample beside its
    training.

    Of the engines, the first part of each interval is the share in which one had a request. An interval ends when a step has its
    groups, so that it reaches back into the training of the step before.
    """
    found = list[Bar]()
    at = since = 0.0
    for row in rows:
        if "trainer_wait_s" not in row or "time_step_s" not in row:
            continue
        step, began = row["step"], at
        for name, doing in _DID:
            found.append(Bar("trainer", step, at, at := at + row.get(name, 0.0), doing))
        took = began + row["trainer_wait_s"]
        busy = since + (1 - row["engine_idle_share"]) * (took - since)
        found += [Bar("engines", step, since, busy, BUSY), Bar("engines", step, busy, took, IDLE)]
        since, at = took, began + row["time_step_s"]
    return found


def waits(rows: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, float]]:
    """Returns the shares of the time in which trainer and engines waited, for each stretch of `size` steps, with its last step."""
    beside = [row for row in rows if "trainer_wait_s" in row and "time_step_s" in row]
    of_step: dict[int, list[Bar]] = {}
    for bar in bars(beside):
        of_step.setdefault(bar.step, []).append(bar)
    found = []
    for part in (beside[at : at + size] for at in range(0, len(beside), size)):
        seconds = dict.fromkeys((WAITS, TRAINS, PUBLISHES, BUSY, IDLE), 0.0)
        for bar in (bar for row in part for bar in of_step[row["step"]]):
            seconds[bar.doing] += bar.end - bar.begin
        whole, sampling = sum(row["time_step_s"] for row in part), seconds[BUSY] + seconds[IDLE]
        found.append(
            {
                "step": part[-1]["step"],
                "trainer": seconds[WAITS] / whole if whole else 0.0,
                "engines": seconds[IDLE] / sampling if sampling else 0.0,
            }
        )
    return found
