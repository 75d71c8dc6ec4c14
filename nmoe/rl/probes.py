"""The probes of a run: held-out problems in the training distribution and, where [eval.ood] asks for it, out of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmoe.config.commands.rl import RLConfig
from nmoe.config.modes import Mode, mode_of
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.baseline import since_baseline
from nmoe.eval.held_out import HeldOutProblems
from nmoe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Probe:
    """One probe: its role, its environment, whether that has tools of its own, and when and how it is asked."""

    role: Literal["id", "ood"]
    environment: Environment
    own_tools: bool
    every_steps: int
    problems: int
    mode: Mode


def probes_of(config: RLConfig, environment: Environment, tokenizer: Tokenizer) -> list[Probe]:
    """The probes that a configuration asks for, the one out of the distribution first. Raises UserError for an environment that
    cannot be loaded."""
    section, found = config.eval, []
    if (ood := section.ood) is not None:
        mode = mode_of(ood.mode, None, ood.temperature)
        outside = Environment.from_settings(ood.environment, tokenizer)
        found.append(Probe("ood", outside, True, ood.every_steps, ood.problems, mode))
    if section.every_steps:
        named = section.environment
        held_out = environment.held_out(section.split) if named is None else Environment.from_settings(named, tokenizer)
        mode = mode_of(None, 1, section.temperature)
        found.append(Probe("id", held_out, named is not None, section.every_steps, section.problems, mode))
    return found


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
                    stack.enter_context(ToolRuntime(probe.environment, config.sandbox)) if probe.own_tools else tools,
                    problems=probe.problems,
                    mode=probe.mode,
                    max_new_tokens=config.sampling.max_new_tokens,
                    seed=config.run.seed,
                ),
            )
            for probe in probes
        ]
        self.every_steps = math.gcd(*(probe.every_steps for probe in probes))

    def __bool__(self) -> bool:
        return bool(self._asked)

    def evaluate(self, step: int, engine: Engine, context_tokens: int, evaluations: Path) -> list[dict[str, Any]]:
        """The results of the probes that are due at a step, as records for eval/, with their differences from step 0."""
        records: list[dict[str, Any]] = []
        for probe, problems in self._asked:
            if step % probe.every_steps == 0 or step == self._steps:
                found = [result.record() for result in problems.evaluate(engine, context_tokens)]
                records += found if probe.role == "id" else [{**one, "role": "ood"} for one in found]
        return since_baseline(records, evaluations)


def notes_of(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One text for each probe: its first result, and the difference from step 0."""
    firsts: dict[Any, Mapping[str, Any]] = {}
    for record in records:
        firsts.setdefault(record.get("role"), record)
    for role, one in firsts.items():
        where = "out of distribution" if role == "ood" else "held-out"
        text = f"{where} {one['mode']} on {one['dataset']} {one['value']:.1%} [{one['low']:.1%}, {one['high']:.1%}]"
        if (since := one.get("since_start")) is not None:
            change = f"{since['difference']:+.1%} [{since['low']:+.1%}, {since['high']:+.1%}]"
            yield f"{text} of {one['problems']}, {change} since the start"
        else:
            yield f"{text} of {one['problems']}"
