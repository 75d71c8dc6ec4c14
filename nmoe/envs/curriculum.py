"""The curriculum: stages that change the rewarded components as the policy acquires capabilities.

The environment lists the stages. Their usual order is format, reasoning, tool use, correctness, efficiency, so that each
component is rewarded after those it depends on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from nmoe.config.tables.rewards import CurriculumSettings, GateSettings
from nmoe.errors import UserError


class Curriculum:
    """Moves from stage to stage as metrics reach thresholds, and holds the reward weights of the current stage.

    A stage's gate opens the next stage as soon as its metric, averaged over the last `window_steps` steps of the stage,
    reaches `at_least`. If the gate has `close_below`, the next stage closes again when the same average, now over that stage's
    own steps, falls below it; without `close_below` stages never close. The distance between the two thresholds prevents
    oscillation.

    Only steps of the current stage count, so that every stage lasts at least `window_steps` steps: a rate measured while
    something else was rewarded says little about the current behaviour.
    """

    def __init__(self, settings: CurriculumSettings) -> None:
        self._settings = settings
        self._index = 0
        self._window: deque[float] = deque(maxlen=settings.window_steps)
        self._closing: deque[float] = deque(maxlen=settings.window_steps)

    @property
    def index(self) -> int:
        """The index of the current stage, counted from 0."""
        return self._index

    @property
    def stage(self) -> str:
        """The name of the current stage."""
        return self._settings.stages[self._index].name

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward component (format, correctness, ...) in the current stage, by the component's name."""
        return self._settings.stages[self._index].weights.model_dump()

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Records the metrics of one step and moves to the next or the previous stage if a gate's threshold is crossed; call it
        once per step.

        The metrics of the gates before and after the current stage must be present and finite. Raises ValueError otherwise: a
        missing number would silently keep the curriculum where it is. Only `correctness` may be missing, in a step of open
        problems; such a step does not count for its gate.
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
        """Adds this step's value of the gate's metric to the window and returns the window's mean; NaN, which fails every
        comparison, until the window is full. Raises ValueError for a missing or non-finite value. A missing `correctness`, which
        means that all problems of the step were open, gives NaN and leaves the window unchanged.
        """
        if gate.metric == "correctness" and gate.metric not in metrics:
            return math.nan  # all problems of this step were open: the window does not change
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
        """Returns the state for a checkpoint, as JSON values:
        {"stages": ["format", "correctness"], "index": 0, "window": [0.5, 0.75], "closing": []}.
        """
        windows = {"window": list(self._window), "closing": list(self._closing)}
        return {"stages": self._names(), "index": self._index, **windows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state` returned. Raises UserError if it was saved under other stages."""
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
