"""Evaluation: the share of problems solved, named with its mode and dataset, with a confidence interval."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.modes import Mode, mode_of
from nmoe.config.tables.pools import task_types
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.text import OpenTask
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.eval.outcomes import Outcome, identity_of, key_of, outcomes_of
from nmoe.rollout.collector import Collector
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.samples import how_ended
from nmoe.statistics import binomial_interval, pass_at_k, share_interval
from nmoe.trajectory import Group
from nmoe.types import FAILURES, ExpertWeightsForm, Precision, Problem, Sampling


@dataclass(frozen=True)
class Evaluation:
    """One result. `mode` says how the completions were sampled, `dataset` what the problems were; never compare across modes.

    Example: `Evaluation("greedy_pass@1", "skills/sort", problems=400, value=0.93, low=0.90, high=0.95)`. The interval is 95%.
    `outcomes` is, where it is kept, the value of each problem by its key, so that two runs can be compared problem by problem.
    `sampling` holds, where it is kept, the temperature, the samples of a problem, the token limit and the reasoning effort.
    `trained_on` is how many of the problems the model was trained on, where that was permitted. `failures` counts, over all
    problems, the completions by how they ended: `{"ok": 6, "truncated": 44}`; `answers` holds the first problems with the answers
    to them, where a run keeps those.
    """

    mode: str
    dataset: str
    problems: int
    value: float
    low: float
    high: float
    outcomes: Mapping[str, float] | None = field(default=None, compare=False, repr=False)
    sampling: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    trained_on: int | None = field(default=None, compare=False, repr=False)
    failures: Mapping[str, int] | None = field(default=None, compare=False, repr=False)
    answers: Sequence[Mapping[str, Any]] | None = field(default=None, compare=False, repr=False)

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        trained = "" if self.trained_on is None else f", {self.trained_on} of them trained on"
        ended = how_ended(self.record())
        return (
            f"{self.mode} on {self.dataset} {self.value:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.problems}{trained}"
            f"{f', {ended}' if ended else ''}"
        )


def evaluate(
    engine: Engine,
    environment: Environment,
    context_tokens: int,
    *,
    problems: int,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    runtime: ToolRuntime | None = None,
) -> list[Evaluation]:
    """Evaluates the environment's next `problems` distinct problems: over all of them first, then by source.

    One sample per problem gives `greedy_pass@1` or `sampling_pass@1`, with the exact binomial interval. Several samples give
    - `sampling_pass@1`, the mean over samples, with an interval over problems;
    - `pass@k` for every k from 2 to the number of samples, the probability that at least one of k samples is right;
    - `sampling_pass@n`, the share of problems where the most frequent answer is right; of equally frequent ones the first given.

    Says where there are fewer problems than that (`say_if_fewer`).
    """
    refuse_open_problems(environment)
    groups = sample_problems(
        engine,
        environment,
        context_tokens,
        problems=problems,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        runtime=runtime,
    )
    say_if_fewer(environment, problems, len(groups))
    return summarise(groups, environment.settings.env_id, temperature)


def sample_problems(
    engine: Engine,
    environment: Environment,
    context_tokens: int,
    *,
    problems: int,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    runtime: ToolRuntime | None = None,
    on_group: Callable[[Group], None] | None = None,
    nondeterminism: bool = False,
    done: Collection[str] = (),
) -> list[Group]:
    """Samples and grades groups for the environment's next problems. Calls `on_group` with each finished group.

    `nondeterminism` permits several greedy samples of a problem, as `nondet_proxy_pass@n` has them; else they raise UserError.
    Problems whose keys are `done` are left out, and the others draw what they would have drawn beside them.
    """
    if not nondeterminism:
        mode_of(None, samples, temperature)
    sandboxes, workspaces = (None, None) if runtime is None else (runtime.sandboxes, runtime.workspaces)
    collector = Collector(engine, environment, context_tokens, sandboxes, workspaces=workspaces)
    key = (seed, "eval", samples, str(temperature))
    sampling = Sampling(max_new_tokens, temperature)
    distinct = distinct_problems(environment, problems)
    asked = [(index, problem) for index, problem in enumerate(distinct) if key_of(problem) not in done]
    indices, left = [index for index, _ in asked], [problem for _, problem in asked]
    return collector.collect(left, samples, sampling, key, indices, on_group, state=None).groups


def say_if_fewer(environment: Environment, problems: int, found: int) -> None:
    """Says on stderr that an environment has only `found` different problems, where that is fewer than are asked for."""
    if found < problems:
        left_out = f", and {environment.overlong:,} do not fit the context" if environment.overlong else ""
        there = f"there are only {found:,} different ones to ask{left_out}"
        print(f"{environment.settings.env_id}: problems = {problems:,}, and {there}", file=sys.stderr)


def distinct_problems(environment: Environment, count: int) -> list[Problem]:
    """The environment's next `count` problems with different questions, or all that it has.

    A problem counted twice would make the interval too narrow.
    """
    found: dict[tuple[object, ...], Problem] = {}
    # A finite pool starts over after its size. An endless one may repeat itself, if it generates from a small space.
    for _ in range(environment.pool.size or 20 * count):
        (problem,) = environment.pool.take(1)
        found.setdefault(identity_of(problem), problem)
        if len(found) == count:
            break
    return list(found.values())


def refuse_open_problems(environment: Environment) -> None:
    """Raises UserError if any problems have no right answer: a solve rate means nothing for them."""
    if any(isinstance(TASKS[name], OpenTask) for name in task_types(environment.settings.task_pool)):
        raise UserError(
            f"environment {environment.settings.env_id!r} has open problems, which have no right answer, so there is no solve rate "
            "to report; a run's metrics `reward/NAME` show its [[rewards]]"
        )


def summarise(groups: Sequence[Group], env_id: str, temperature: float) -> list[Evaluation]:
    """Evaluations of graded groups (`summarise_outcomes`)."""
    return summarise_outcomes(outcomes_of(groups), env_id, temperature)


def summarise_outcomes(outcomes: Sequence[Outcome], env_id: str, temperature: float) -> list[Evaluation]:
    """Evaluations of problems: overall, by source if there are several, and by the level and subject that problems name.

    The dataset is then named "math", "math/level=Level 5" or "math/subject=Algebra". Those over all problems keep the value of
    each one, and the first of them how the completions ended.
    """
    sources = sorted({one.source for one in outcomes})
    parts: list[tuple[str, Sequence[Outcome]]] = []
    if len(sources) > 1:
        parts += [(f"{env_id}/{source}", [one for one in outcomes if one.source == source]) for source in sources]
    named = sorted({name for one in outcomes for name in one.groups})
    parts += [(f"{env_id}/{name}", [one for one in outcomes if name in one.groups]) for name in named]
    whole = [
        replace(evaluation, outcomes=dict(zip((one.key for one in outcomes), values, strict=True)))
        for evaluation, values in _evaluations(env_id, outcomes, temperature)
    ]
    whole[0] = replace(whole[0], failures=_failures(outcomes))
    return whole + [one for dataset, part in parts for one, _ in _evaluations(dataset, part, temperature)]


def _failures(outcomes: Sequence[Outcome]) -> dict[str, int] | None:
    counted = Counter(failure for one in outcomes for failure in one.failures)
    return {name: counted[name] for name in FAILURES if counted[name]} or None


def _evaluations(dataset: str, outcomes: Sequence[Outcome], temperature: float) -> list[tuple[Evaluation, list[float]]]:
    """Evaluations of problems, each with its value on every problem."""
    samples = len(outcomes[0].correct)
    first = [float(one.correct[0]) for one in outcomes]
    if samples == 1:
        return [_shown("greedy_pass@1" if temperature == 0 else "sampling_pass@1", dataset, first)]
    rights = [sum(one.correct) for one in outcomes]
    if temperature == 0:
        return [_shown(f"nondet_proxy_pass@{samples}", dataset, [float(count > 0) for count in rights])]
    voted = [float(one.correct[one.voted]) for one in outcomes]
    return [
        _shown("sampling_pass@1", dataset, [count / samples for count in rights], binary=False),
        *(
            _shown(f"pass@{k}", dataset, [pass_at_k(count, samples, k) for count in rights], binary=k == samples)
            for k in range(2, samples + 1)
        ),
        _shown(f"sampling_pass@{samples}", dataset, voted),
    ]


def _shown(mode: str, dataset: str, values: list[float], binary: bool = True) -> tuple[Evaluation, list[float]]:
    """The mean of a value per problem: with the exact interval where each is 0 or 1, else with `share_interval`."""
    if binary:
        return share_of(mode, dataset, [value == 1 for value in values]), values
    interval = share_interval(values)
    return Evaluation(mode, dataset, len(values), sum(values) / len(values), interval.low, interval.high), values


def share_of(mode: str, dataset: str, outcomes: Sequence[bool]) -> Evaluation:
    """The share of true outcomes, one per problem, with the exact binomial interval."""
    interval = binomial_interval(sum(outcomes), len(outcomes))
    return Evaluation(mode, dataset, len(outcomes), sum(outcomes) / len(outcomes), interval.low, interval.high)


@dataclass(frozen=True)
class Asked:
    """The mode, how many problems, and the seed. `max_tokens` and `reasoning_effort` override context and environment;
    `best_of` is a scorer that chooses among the samples. `allow_trained_on` permits problems that a model was trained on."""

    mode: Mode
    problems: int
    seed: int
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    device: str = "auto"
    expert_weights: ExpertWeightsForm = "dequantized"
    best_of: Path | None = None
    allow_trained_on: bool = False
    precision: Precision | None = None


def sampling_record(mode: Mode, max_tokens: int | None, effort: str | None) -> dict[str, Any]:
    """The sampling settings that an evaluation records; results are comparable if these are equal."""
    settings = {"temperature": mode.temperature, "samples": mode.samples}
    return {**settings, "max_tokens": max_tokens, "reasoning_effort": effort}


def effortful(settings: EnvironmentSettings, effort: str | None) -> EnvironmentSettings:
    """The environment with this reasoning effort instead. Raises UserError for a format that has no such setting."""
    if effort is None:
        return settings
    if settings.format == "boxed":
        raise UserError(f"{settings.env_id}: plain text has no place for a reasoning effort; drop --reasoning-effort")
    return settings.model_copy(update={"reasoning_effort": effort})


def models_and_benchmarks(named: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Divides `CHECKPOINT... BENCHMARK...`: the first is a model, and so are those behind it that hold one. Raises UserError where
    no benchmark is left."""
    count = 1
    while count < len(named) - 1 and _holds_a_model(named[count]):
        count += 1
    if len(named) < 2:
        raise UserError("eval needs a BENCHMARK behind the checkpoints: a TOML file, a directory or a packaged name")
    return list(named[:count]), list(named[count:])


def _holds_a_model(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        resolve_checkpoint(path)
    except UserError:
        return False
    return True
