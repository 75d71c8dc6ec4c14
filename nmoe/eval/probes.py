"""The probes of a run: what its [[eval]] tables ask, in the training distribution and out of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from nmoe.config.environment import held_out
from nmoe.config.tables.evaluation import ProbeSection, RLEvalSection
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.asked import effortful
from nmoe.eval.baseline import since_baseline, since_start
from nmoe.eval.early_stopping import Rates, rates_of, reason_of_drops, reason_to_end
from nmoe.eval.held_out import HeldOutProblems
from nmoe.rollout.collector import GradingError
from nmoe.runs.answers import how_ended
from nmoe.runs.directory import RunDirectory
from nmoe.runs.ledger import OUTSIDE
from nmoe.text.tokenizer import Tokenizer


class ProbedEngine(Engine, Protocol):
    """An engine that samples between the steps of a run."""

    def forget_prefixes(self) -> None: ...


@dataclass(frozen=True)
class Probe:
    """One probe: its [[eval]] table, the environment that it asks, and the most tokens of a completion. `shares_tools` says that
    it asks the training environment, whose tools run already."""

    section: ProbeSection
    environment: Environment
    max_tokens: int
    shares_tools: bool

    def own(self, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
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
        """`steps` is the number of the last step. `tools` are those of the training environment; runtimes of a probe's own are
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
        return since_baseline(records, directory.path / "eval")

    def reason_to_end(self, evaluations: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
        """Why the run ends after the last of these evaluations, each the results of a step, oldest first; None if it goes on.
        Only a probe that was asked last can end it: the run went on after what others said, the baseline among it."""
        for probe, _ in self._asked:
            if not probe.own(evaluations[-1]):
                continue
            section = probe.section
            own = [mine for results in evaluations if (mine := probe.own(results))]
            whole = [results[0] for results in own]
            if (reason := reason_of_drops(whole, section.fatal_drops, section.role)) is not None:
                return reason
            rates: list[Rates] = [rates_of(results) for results in own]
            if rates and (reason := reason_to_end(rates, section.enough, section.patience)) is not None:
                return reason
        return None

    def notes(self, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """One text for each probe among the records: its result over all problems, and the difference from step 0."""
        for probe, _ in self._asked:
            for one in probe.own(records)[:1]:
                where = "out of distribution" if probe.section.role == OUTSIDE else "held-out"
                text = f"{where} {one['mode']} on {one['dataset']} {one['value']:.1%} [{one['low']:.1%}, {one['high']:.1%}]"
                ended = how_ended(one)
                yield f"{text} of {one['problems']}{since_start(one)}{f', {ended}' if ended else ''}"
