"""The curriculum: what is rewarded changes as capabilities are there, in the order that the environment's stages have.

The usual order is format, reasoning, tool use, correctness, efficiency: nothing is rewarded before what it rests on is learned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from nmoe.config.tables.curriculum import CurriculumSettings, GateSettings
from nmoe.errors import UserError


class Curriculum:
    """A stage's weights are in force until its gate holds: its metric, averaged over the last `window_steps` steps of
    this stage, reaches `at_least`. Then the next stage opens. Where the gate has `close_below`, and the same average, now over
    steps of the stage that it opened, falls below that, the stage closes again; otherwise none ever does. The distance between
    the two rates keeps stages from flickering.

    Steps of another stage do not count, so that every stage lasts `window_steps` steps at least: a rate measured while
    something else was rewarded says little of how it holds now.
    """

    def __init__(self, settings: CurriculumSettings) -> None:
        self._settings = settings
        self._index = 0
        self._window: deque[float] = deque(maxlen=settings.window_steps)
        self._closing: deque[float] = deque(maxlen=settings.window_steps)

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
        """Takes in one step's metrics; call it once a step. Needs the metrics of the gates before and behind the stage in force,
        finite rates.

        Raises ValueError without them: a curriculum that stays where it is for lack of a number would do so silently.
        """
        stages = self._settings.stages
        behind, ahead = stages[self._index - 1].gate if self._index else None, stages[self._index].gate
        closing = math.inf if behind is None else self._mean(self._closing, behind, metrics)
        opening = -math.inf if ahead is None else self._mean(self._window, ahead, metrics)
        if behind is not None and behind.close_below is not None and closing < behind.close_below:
            self._move(-1)
        elif ahead is not None and opening >= ahead.at_least:
            self._move(+1)

    def _mean(self, window: deque[float], gate: GateSettings, metrics: Mapping[str, float]) -> float:
        """Of the window with this step's rate; NaN, which no comparison holds for, until the window is full."""
        if gate.metric == "correctness" and gate.metric not in metrics:
            return math.nan  # all problems of this step were open: the window keeps what it has
        rate = metrics.get(gate.metric, math.nan)
        if not math.isfinite(rate):
            raise ValueError(f"a gate of stage {self.stage!r} needs a finite {gate.metric!r} at each step, got {rate}")
        window.append(rate)
        return fmean(window) if len(window) == window.maxlen else math.nan

    def _move(self, stages: int) -> None:
        self._index += stages
        self._window.clear()
        self._closing.clear()

    def state(self) -> dict[str, Any]:
        """JSON-able: {"stages": ["format", "correctness"], "index": 0, "window": [0.5, 0.75], "closing": []}."""
        windows = {"window": list(self._window), "closing": list(self._closing)}
        return {"stages": self._names(), "index": self._index, **windows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. Raises UserError where it was saved under other stages."""
        if state.get("stages") != self._names():
            raise UserError(
                f"the saved curriculum has the stages {state.get('stages')}, and this one has {self._names()}; restore "
                "[curriculum], or start a new run"
            )
        self._index = state["index"]
        self._window = deque(state["window"], maxlen=self._settings.window_steps)
        self._closing = deque(state["closing"], maxlen=self._settings.window_steps)

    def _names(self) -> list[str]:
        return [stage.name for stage in self._settings.stages]
