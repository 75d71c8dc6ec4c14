"""Evaluation during a run, on the same held-out problems each time."""

from __future__ import annotations

from dataclasses import replace

from nmoe.config.modes import Mode
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.asked import sampling_record
from nmoe.eval.evaluate import Evaluation, refuse_open_problems, sample_problems, say_if_fewer, summarise_outcomes
from nmoe.eval.outcomes import answers_of, outcomes_of
from nmoe.runs.answers import COMPLETIONS, bounded


class HeldOutProblems:
    """The next `problems` distinct problems of an environment, in one mode. `tools` is where its tools run."""

    def __init__(
        self,
        environment: Environment,
        tools: ToolRuntime,
        *,
        problems: int,
        mode: Mode,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self._environment, self._tools, self._start = environment, tools, environment.state()
        self._problems, self._mode = problems, mode
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._fewer_said = False

    def evaluate(self, engine: Engine, context_tokens: int) -> list[Evaluation]:
        """The mode's results first: over all problems, with the value of each and the answers to the first ones, then by source.
        The first call says where there are fewer problems than are asked for."""
        self._environment.load_state(self._start)
        refuse_open_problems(self._environment)
        groups = sample_problems(
            engine,
            self._environment,
            context_tokens,
            problems=self._problems,
            samples=self._mode.samples,
            temperature=self._mode.temperature,
            nondeterminism=self._mode.is_of_nondeterminism,
            max_new_tokens=self._max_new_tokens,
            seed=self._seed,
            runtime=self._tools,
        )
        if not self._fewer_said:
            say_if_fewer(self._environment, self._problems, len(groups))
            self._fewer_said = True
        settings = self._environment.settings
        sampling = sampling_record(self._mode, self._max_new_tokens, settings.reasoning_effort)
        outcomes = outcomes_of(groups)
        found = summarise_outcomes(outcomes, settings.env_id, self._mode.temperature)
        failures = found[0].failures
        results = [replace(one, sampling=sampling, failures=None) for one in found]
        first, *others = sorted(
            results, key=lambda one: one.mode != self._mode.name
        )  # stable: the mode's own come first
        kept = max(1, COMPLETIONS // self._mode.samples)
        answers = [
            bounded({**answers_of(group), "correct": list(outcome.correct)})
            for group, outcome in zip(groups[:kept], outcomes[:kept], strict=True)
        ]
        return [replace(first, failures=failures, answers=answers), *others]
