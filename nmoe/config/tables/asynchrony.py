"""[async]: sampling beside the trainer, with samples of older weights."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import Conflict, Section

InFlight = Literal["recompute", "stale_kv", "drain"]
"""What a publication of weights does to the requests that run on engine servers."""


class AsyncSection(Section):
    """[async]: sampling beside the trainer, with samples of older weights."""

    max_staleness: int = Field(default=0, ge=0, le=64)
    """how many versions older than the learner the weights may be that sampled a token which it trains on; 0: each step samples,
    then trains. More than 0 needs engine servers, and sets algorithm.correction to `tis` unless it is given"""
    in_flight: InFlight = "recompute"
    """what a publication does to running requests. recompute: they go on by the new weights, which read the tokens so far once
    more; stale_kv: they go on by the new weights with the keys and values of the old; drain: it waits until they have ended"""
    overdue: Literal["wait", "drop"] = "wait"
    """groups that would be too old after the next step and still run. wait: the step waits for them; drop: they are given up,
    which removes long samples more often than short ones"""

    def conflicts(self) -> Iterator[Conflict]:
        for name in ("in_flight", "overdue"):
            if not self.max_staleness and getattr(self, name) != type(self).model_fields[name].default:
                yield Conflict(name, "nothing is sampled beside the trainer; set async.max_staleness")
