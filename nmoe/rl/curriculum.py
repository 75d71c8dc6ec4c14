"""The curriculum: what is rewarded changes as capabilities are there, in the order that the environment's stages have.

The usual order is format, reasoning, correctness, efficiency: nothing is rewarded before what it rests on is learned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from nmoe.config.environment import CurriculumSettings
from nmoe.errors import UserError


class Curriculum:
    """A stage's weights are in force until its gate holds: its metric, averaged over the last `window_steps` steps of
    this stage, reaches `at_least`. Then the next stage opens; none ever closes again.

    Steps of an earlier stage do not count, so that every stage lasts `window_steps` steps at least: a rate measured while
    something else was rewarded says little of how it holds now.
    """

    def __init__(self, settings: CurriculumSettings) -> None:
        self._settings = settings
        self._index = 0
        self._window: deque[float] = deque(maxlen=settings.window_steps)

    @property
    def index(self) -> int:
        """The stage in force, counted from 0."""
        return self._index

    @property
    def stage(self) -> str:
        """The name of the stage in force."""
        return self._settings.stages[self._index].name

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each component of a grade, now."""
        return self._settings.stages[self._index].weights.model_dump()

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Takes in one step's metrics; call it once a step. Needs the metric of the gate in force, a finite rate.

        Raises ValueError without it: a curriculum that stays where it is for lack of a number would do so silently.
        """
        gate = self._settings.stages[self._index].gate
        if gate is None:
            return
        rate = metrics.get(gate.metric, math.nan)
        if not math.isfinite(rate):
            raise ValueError(
                f"the gate of stage {self.stage!r} needs a finite {gate.metric!r} at each step, got {rate}"
            )
        self._window.append(rate)
        if len(self._window) == self._window.maxlen and fmean(self._window) >= gate.at_least:
            self._index += 1
            self._window.clear()

    def state(self) -> dict[str, Any]:
        """JSON-able: {"stages": ["format", "correctness"], "index": 0, "window": [0.5, 0.75]}."""
        return {"stages": self._names(), "index": self._index, "window": list(self._window)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. Raises UserError where it was saved under other stages."""
        if state.get("stages") != self._names():
            raise UserError(
                f"the saved curriculum has the stages {state.get('stages')}, and this one has {self._names()}; restore "
                "[curriculum], or start a new run"
            )
        self._index = state["index"]
        self._window = deque(state["window"], maxlen=self._settings.window_steps)

    def _names(self) -> list[str]:
        return [stage.name for stage in self._settings.stages]
