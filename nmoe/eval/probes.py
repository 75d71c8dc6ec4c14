"""Evaluations during training: the environments of a run's [[eval]] tables, with the same held-out problems every time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from nmoe.config.environment import held_out
from nmoe.config.modes import Mode
from nmoe.config.tables.evaluation import ProbeSection, RLEvalSection
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.early_stopping import Rates, rates_of, reason_of_drops, reason_to_end, since_baseline, since_start
from nmoe.eval.evaluate import (
    Evaluation,
    effortful,
    refuse_open_problems,
    sample_problems,
    sampling_record,
    say_if_fewer,
    summarise_outcomes,
)
from nmoe.eval.outcomes import answers_of, outcomes_of
from nmoe.rollout.collector import GradingError
from nmoe.runs.directory import RunDirectory
from nmoe.runs.ledger import OUTSIDE
from nmoe.runs.samples import COMPLETIONS, bounded, how_ended
from nmoe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Probe:
    """An environment that a run is evaluated on: its [[eval]] table, the loaded environment, and the token limit of a
    completion.

    `shares_tools` says that it is a split of the training environment, whose tool processes it uses.
    """

    section: ProbeSection
    environment: Environment
    max_tokens: int
    shares_tools: bool

    def results_in(self, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns this probe's results from a list of evaluation results: over all problems first, then by source."""
        name, mode = self.environment.settings.env_id, self.section.sampled.name
        return [one for one in results if one["mode"] == mode and f"{one['dataset']}/".startswith(f"{name}/")]


def probes_of(
    sections: Sequence[ProbeSection],
    tokenizer: Tokenizer,
    training: Environment | None = None,
    max_tokens: int | None = None,
) -> list[Probe]:
    """Loads the environments of a run's [[eval]] tables; those out of the training distribution come first.

    The first one decides which checkpoint is the best. A table without an environment evaluates a split of the
    environment `training`. `max_tokens` is the default token limit of a completion. Raises UserError if an environment
    cannot be loaded.
    """
    probes = []
    for section in sorted(sections, key=lambda one: one.role != OUTSIDE):
        settings = section.environment
        if settings is None:
            assert isinstance(section, RLEvalSection), "only RL trains on an environment"
            assert training is not None, "given where a table asks a split of it"
            settings = held_out(training.settings, section.split)
        assert settings is not None, "the configuration refuses a split that is not there"
        environment = Environment.from_settings(effortful(settings, section.reasoning_effort), tokenizer)
        longest = section.max_tokens or max_tokens
        assert longest is not None, "the configuration requires one"
        probes.append(Probe(section, environment, longest, section.environment is None))
    return probes


class Probes:
    """All environments that a run is evaluated on, with their held-out problems."""

    def __init__(
        self,
        probes: Sequence[Probe],
        tokenizer: Tokenizer,
        context_tokens: int,
        sandbox: SandboxSettings,
        stack: ExitStack,
        *,
        steps: int,
        seed: int,
        tools: ToolRuntime | None = None,
    ) -> None:
        """Selects the problems and starts the tool processes that they need.

        `steps` is the number of the run's last step. `tools` runs the tools of the training environment; tool processes
        of other environments end when `stack` closes. Problems whose prompts do not fit the model's context are left
        out.
        """
        self._steps, self._tokenizer, self._context_tokens = steps, tokenizer, context_tokens
        self._asked, self.provenance = list[tuple[Probe, HeldOutProblems]](), dict[str, str]()
        for probe in probes:
            probe.environment.leave_out_overlong(context_tokens, probe.max_tokens)
            if probe.shares_tools:
                assert tools is not None, "the training environment has its tools"
                runtime = tools
            else:
                runtime = stack.enter_context(ToolRuntime(probe.environment, sandbox))
            self.provenance |= runtime.provenance()
            problems = HeldOutProblems(
                probe.environment,
                runtime,
                problems=probe.section.problems,
                mode=probe.section.sampled,
                max_new_tokens=probe.max_tokens,
                seed=seed,
            )
            self._asked.append((probe, problems))
        self.every_steps = math.gcd(*(probe.section.every_steps for probe in probes))

    def __bool__(self) -> bool:
        return bool(self._asked)

    def evaluate(self, step: int, engine: Engine, directory: RunDirectory) -> list[dict[str, Any]]:
        """Evaluates the environments that are due at this step; returns JSON records with their differences from step 0.

        If a grader fails, saves the sample that it failed on, and raises its GradingError.
        """
        engine.forget_prefixes()
        records: list[dict[str, Any]] = []
        try:
            for probe, problems in self._asked:
                if step % probe.section.every_steps == 0 or step == self._steps:
                    role = probe.section.role
                    found = problems.evaluate(engine, self._context_tokens)
                    allowed = {"allow_trained_on": True} if probe.section.allow_trained_on else {}
                    records += [result.record() | {"role": role} | allowed for result in found]
        except GradingError as error:
            lost = error.trajectory
            directory.ledger.failure(lost.record(step, self._tokenizer.decode(lost.token_ids)))
            raise
        engine.sleep()
        return since_baseline(records, directory.path / "eval")

    def reason_to_end(self, evaluations: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
        """Returns the reason to end the run early, as a text; None if it goes on.

        `evaluations` has the results of each evaluated step, oldest first. Only environments in the last evaluation are
        considered, because the run already continued after earlier results of the others.
        """
        for probe, _ in self._asked:
            if not probe.results_in(evaluations[-1]):
                continue
            section = probe.section
            history = [mine for results in evaluations if (mine := probe.results_in(results))]
            whole = [results[0] for results in history]
            if (reason := reason_of_drops(whole, section.fatal_drops, section.role)) is not None:
                return reason
            rates: list[Rates] = [rates_of(results) for results in history]
            if rates and (reason := reason_to_end(rates, section.enough, section.patience)) is not None:
                return reason
        return None

    def notes(self, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yields a line for each evaluated environment: the result over all problems, and the difference from step 0."""
        for probe, _ in self._asked:
            for one in probe.results_in(records)[:1]:
                where = "out of distribution" if probe.section.role == OUTSIDE else "held-out"
                text = f"{where} {one['mode']} on {one['dataset']} {one['value']:.1%} [{one['low']:.1%}, {one['high']:.1%}]"
                ended = how_ended(one)
                yield f"{text} of {one['problems']}{since_start(one)}{f', {ended}' if ended else ''}"


class HeldOutProblems:
    """The held-out problems of one environment, evaluated in one sampling mode; the problems are the same at every evaluation.

    `tools` runs the environment's tools.
    """

    def __init__(
        self, environment: Environment, tools: ToolRuntime, *, problems: int, mode: Mode, max_new_tokens: int, seed: int
    ) -> None:
        self._environment, self._tools, self._start = environment, tools, environment.state()
        self._problems, self._mode = problems, mode
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._fewer_said = False

    def evaluate(self, engine: Engine, context_tokens: int) -> list[Evaluation]:
        """Samples and grades the problems; returns the results of the configured mode first: over all problems, then by source.

        The first result contains the value of each problem and the answers to the first few. The first call prints a
        warning if there are fewer problems than requested.
        """
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
