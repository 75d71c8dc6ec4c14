"""The probes of a run: the environments that its [[eval]] tables ask, on the same held-out problems at every evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

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


class ProbedEngine(Engine, Protocol):
    """An engine that samples between the steps of a run."""

    def forget_prefixes(self) -> None: ...

    def sleep(self) -> None: ...


@dataclass(frozen=True)
class Probe:
    """One probe: its [[eval]] table, the environment that it asks, and the most tokens of a completion. `shares_tools` says that
    it asks the training environment, whose tools run already."""

    section: ProbeSection
    environment: Environment
    max_tokens: int
    shares_tools: bool

    def results_in(self, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """This probe's among the results of an evaluation, in its mode: over all problems first, then by source."""
        name, mode = self.environment.settings.env_id, self.section.sampled.name
        return [one for one in results if one["mode"] == mode and f"{one['dataset']}/".startswith(f"{name}/")]


def probes_of(
    sections: Sequence[ProbeSection],
    tokenizer: Tokenizer,
    training: Environment | None = None,
    max_tokens: int | None = None,
) -> list[Probe]:
    """The probes that [[eval]] tables ask for, those out of the distribution first, since the first decides which checkpoint is
    best. `training` is the environment that a table without one takes a split of, and `max_tokens` the default of each. Raises
    UserError for an environment that cannot be loaded."""
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
    """The probes with the problems that they ask, the same ones at every evaluation."""

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
        """`steps` is the number of the last step. `tools` are the training environment's; other runtimes of probes are
        closed with `stack`. Problems whose prompts do not fit the context of the model are left out."""
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

    def evaluate(self, step: int, engine: ProbedEngine, directory: RunDirectory) -> list[dict[str, Any]]:
        """The results of the probes that are due at a step, as records for eval/, with their differences from step 0. Raises
        GradingError with its sample saved."""
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
        """Why the run ends after the last of these evaluations, each the results of a step, oldest first; None if it goes on.
        Only a probe that was asked last can end it: the run went on after the results of the others, such as the baseline."""
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
        """One text for each probe among the records: its result over all problems, and the difference from step 0."""
        for probe, _ in self._asked:
            for one in probe.results_in(records)[:1]:
                where = "out of distribution" if probe.section.role == OUTSIDE else "held-out"
                text = f"{where} {one['mode']} on {one['dataset']} {one['value']:.1%} [{one['low']:.1%}, {one['high']:.1%}]"
                ended = how_ended(one)
                yield f"{text} of {one['problems']}{since_start(one)}{f', {ended}' if ended else ''}"


class HeldOutProblems:
    """The next `problems` distinct problems of an environment, in one mode. `tools` is where its tools run."""

    def __init__(
        self, environment: Environment, tools: ToolRuntime, *, problems: int, mode: Mode, max_new_tokens: int, seed: int
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
