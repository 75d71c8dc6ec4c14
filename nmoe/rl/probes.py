"""The probes of a run: what its [[eval]] tables ask, in the training distribution and out of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.config.commands.rl import RLConfig
from nmoe.config.environment import held_out
from nmoe.config.tables.evaluation import ProbeSection
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.asked import effortful
from nmoe.eval.baseline import since_baseline, since_start
from nmoe.eval.held_out import HeldOutProblems
from nmoe.rl.early_stopping import Rates, rates_of, reason_of_drops, reason_to_end
from nmoe.runs.ledger import OUTSIDE
from nmoe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Probe:
    """One probe: its [[eval]] table, and the environment that it asks."""

    section: ProbeSection
    environment: Environment

    def max_tokens(self, config: RLConfig) -> int:
        """The most tokens of a completion."""
        return self.section.max_tokens or config.sampling.max_new_tokens

    def own(self, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """This probe's among the results of an evaluation, in its mode: over all problems first, then by source."""
        name, mode = self.environment.settings.env_id, self.section.sampled.name
        return [one for one in results if one["mode"] == mode and f"{one['dataset']}/".startswith(f"{name}/")]


def probes_of(config: RLConfig, environment: Environment, tokenizer: Tokenizer) -> list[Probe]:
    """The probes that a configuration asks for, those out of the distribution first, since the first decides which checkpoint is
    best. Raises UserError for an environment that cannot be loaded."""
    sections = sorted(config.eval, key=lambda one: one.role != OUTSIDE)
    return [Probe(one, _environment(one, environment, tokenizer)) for one in sections]


def _environment(section: ProbeSection, training: Environment, tokenizer: Tokenizer) -> Environment:
    settings = held_out(training.settings, section.split) if section.environment is None else section.environment
    assert settings is not None, "the configuration refuses a split that is not there"
    return Environment.from_settings(effortful(settings, section.reasoning_effort), tokenizer)


class Probes:
    """The probes with the problems that they ask, the same ones at every evaluation."""

    def __init__(self, probes: Sequence[Probe], config: RLConfig, tools: ToolRuntime, stack: ExitStack) -> None:
        """`tools` are those of training; runtimes of a probe's own are closed with `stack`."""
        self._steps = config.run.steps
        self._asked = [
            (
                probe,
                HeldOutProblems(
                    probe.environment,
                    tools
                    if probe.section.environment is None
                    else stack.enter_context(ToolRuntime(probe.environment, config.sandbox)),
                    problems=probe.section.problems,
                    mode=probe.section.sampled,
                    max_new_tokens=probe.max_tokens(config),
                    seed=config.run.seed,
                ),
            )
            for probe in probes
        ]
        self.every_steps = math.gcd(*(probe.section.every_steps for probe in probes))

    def __bool__(self) -> bool:
        return bool(self._asked)

    def evaluate(self, step: int, engine: Engine, context_tokens: int, evaluations: Path) -> list[dict[str, Any]]:
        """The results of the probes that are due at a step, as records for eval/, with their differences from step 0."""
        records: list[dict[str, Any]] = []
        for probe, problems in self._asked:
            if step % probe.section.every_steps == 0 or step == self._steps:
                role = probe.section.role
                records += [result.record() | {"role": role} for result in problems.evaluate(engine, context_tokens)]
        return since_baseline(records, evaluations)

    def reason_to_end(self, evaluations: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
        """Why the run ends after the last of these evaluations, each the results of a step, oldest first; None where it goes on."""
        for probe, _ in self._asked:
            section = probe.section
            own = [mine for results in evaluations if (mine := probe.own(results))]
            values: list[float] = [results[0]["value"] for results in own]
            if (reason := reason_of_drops(values, section.fatal_drops, section.role)) is not None:
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
                yield f"{text} of {one['problems']}{since_start(one)}"
