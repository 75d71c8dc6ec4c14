"""Evaluation: the share of problems solved, named with its mode and dataset, with a confidence interval."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nmoe.config.tables.pools import task_types
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.pools.order import stable_hash
from nmoe.envs.tasks import TASKS
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.rollout.collector import Collector
from nmoe.runs.waiting import wait_for
from nmoe.statistics import clustered_mean, pass_at_k, wilson
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Problem, Sampling


@dataclass(frozen=True)
class Evaluation:
    """One result. `mode` says how the completions were sampled, `dataset` what the problems were; never compare across modes.

    Example: `Evaluation("greedy_pass@1", "skills/sort", problems=400, value=0.93, low=0.90, high=0.95)`. The interval is 95%.
    `outcomes` is, where it is kept, 1 or 0 for each problem's key, so that two runs can be compared problem by problem.
    """

    mode: str
    dataset: str
    problems: int
    value: float
    low: float
    high: float
    outcomes: Mapping[str, int] | None = field(default=None, compare=False, repr=False)

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return f"{self.mode} on {self.dataset} {self.value:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.problems}"


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

    One sample per problem gives `greedy_pass@1` or `sampling_pass@1`, with Wilson's interval. Several samples give
    - `sampling_pass@1`, the mean over samples, with an interval clustered by problem;
    - `pass@k` for every k from 2 to the number of samples, the probability that at least one of k samples is right;
    - `majority@n`, the share of problems where the most frequent answer is right.
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
) -> list[Group]:
    """Samples and grades groups for the environment's next problems. Calls `on_group` with each finished group.

    Raises UserError for greedy sampling of more than one sample.
    """
    if temperature == 0 and samples > 1:
        raise UserError(
            f"temperature 0 gives the same completion {samples} times: use 1 sample, or a temperature above 0"
        )
    sandboxes, workspaces = (None, None) if runtime is None else (runtime.sandboxes, runtime.workspaces)
    collector = Collector(engine, environment, context_tokens, sandboxes, workspaces=workspaces)
    key = (seed, "eval", samples, str(temperature))
    sampling = Sampling(max_new_tokens, temperature)
    asked = distinct_problems(environment, problems)
    return collector.collect(asked, samples, sampling, key, on_group=on_group, state=None).groups


def distinct_problems(environment: Environment, count: int) -> list[Problem]:
    """The environment's next `count` problems with different questions, or all that it has.

    A problem counted twice would make the interval too narrow.
    """
    found: dict[tuple[object, ...], Problem] = {}
    # A finite pool starts over after its size. An endless one may repeat itself, if it generates from a small space.
    for _ in range(environment.pool.size or 20 * count):
        (problem,) = environment.pool.take(1)
        found.setdefault(_identity(problem), problem)
        if len(found) == count:
            break
    return list(found.values())


def _identity(problem: Problem) -> tuple[object, ...]:
    """What makes two problems the same. Episodes may begin with the same words and go on from different states."""
    return problem.task_type, problem.question, problem.metadata.get("state")


def outcomes_of(groups: Sequence[Group]) -> dict[str, int]:
    """Whether the first sample of each group is right, by a key of what is asked that is the same in every run:
    `{"5f2c01d9a7b3e846": 1, ...}`."""
    return {
        f"{stable_hash(*_identity(group.problem)):016x}": int(is_correct(group.trajectories[0])) for group in groups
    }


def refuse_open_problems(environment: Environment) -> None:
    """Raises UserError if any problems have no right answer: a solve rate means nothing for them."""
    if not all(TASKS[name].has_gold for name in task_types(environment.settings.task_pool)):
        raise UserError(
            f"environment {environment.settings.env_id!r} has open problems, which have no right answer, so there is no solve rate "
            "to report; a run's metrics `reward/NAME` show its [[rewards]]"
        )


def summarise(groups: Sequence[Group], env_id: str, temperature: float) -> list[Evaluation]:
    """Evaluations of graded groups: overall, by source if there are several, and by the level and subject that problems name.

    The dataset is then named "math", "math/level=Level 5" or "math/subject=Algebra".
    """
    voted = majorities(groups) if len(groups[0].trajectories) > 1 else [0] * len(groups)
    rows = list(zip(groups, voted, strict=True))
    sources = sorted({group.problem.source for group in groups})
    parts = [(env_id, rows)]
    if len(sources) > 1:
        parts += [
            (f"{env_id}/{source}", [row for row in rows if row[0].problem.source == source]) for source in sources
        ]
    named = sorted({name for group in groups for name in group.problem.groups})
    parts += [(f"{env_id}/{name}", [row for row in rows if name in row[0].problem.groups]) for name in named]
    return [evaluation for dataset, part in parts for evaluation in _evaluations(dataset, part, temperature)]


def _evaluations(dataset: str, rows: Sequence[tuple[Group, int]], temperature: float) -> list[Evaluation]:
    """Evaluations of groups, each given with the index of its majority sample."""
    groups = [group for group, _ in rows]
    samples = len(groups[0].trajectories)
    if samples == 1:
        mode = "greedy_pass@1" if temperature == 0 else "sampling_pass@1"
        return [share_of(mode, dataset, [is_correct(group.trajectories[0]) for group in groups])]
    outcomes = [[is_correct(t) for t in group.trajectories] for group in groups]
    mean = sum(map(sum, outcomes)) / (samples * len(outcomes))
    low, high = 0.0, 1.0  # a single problem does not show the spread between problems
    if len(outcomes) > 1:
        interval = clustered_mean(
            [float(outcome) for row in outcomes for outcome in row],
            [place for place, row in enumerate(outcomes) for _ in row],
        ).interval
        low, high = max(low, interval.low), min(high, interval.high)
    return [
        Evaluation("sampling_pass@1", dataset, len(groups), mean, low, high),
        *(_pass_at(k, dataset, [sum(row) for row in outcomes], samples) for k in range(2, samples)),
        share_of(f"pass@{samples}", dataset, [any(row) for row in outcomes]),
        share_of(f"majority@{samples}", dataset, [row[place] for row, (_, place) in zip(outcomes, rows, strict=True)]),
    ]


def _pass_at(k: int, dataset: str, correct: Sequence[int], samples: int) -> Evaluation:
    """pass@k: its mean over problems, with the interval of a mean."""
    rates = [pass_at_k(count, samples, k) for count in correct]
    low, high = 0.0, 1.0
    if len(rates) > 1:
        interval = clustered_mean(rates, range(len(rates))).interval
        low, high = max(low, interval.low), min(high, interval.high)
    return Evaluation(f"pass@{k}", dataset, len(rates), sum(rates) / len(rates), low, high)


def share_of(mode: str, dataset: str, outcomes: Sequence[bool]) -> Evaluation:
    """The share of true outcomes, one per problem, with Wilson's interval."""
    interval = wilson(sum(outcomes), len(outcomes))
    return Evaluation(mode, dataset, len(outcomes), sum(outcomes) / len(outcomes), interval.low, interval.high)


def is_correct(trajectory: Trajectory) -> bool:
    """Whether the grader judged the answer correct."""
    return trajectory.grade.extras["correctness"] == 1


def majorities(groups: Sequence[Group]) -> list[int]:
    r"""Majority vote (self-consistency; Wang et al. 2022, arXiv:2203.11171, section 2).

    For each group, the index of the first sample with the most frequent answer. Of equally frequent answers the one given
    first wins; 0 if no sample answers. The problem's task decides which answers are the same: `0.5`, `1/2` and `\frac12` are
    three votes for one.
    """

    async def everything() -> list[int]:
        return list(await asyncio.gather(*map(_majority, groups)))

    return wait_for(everything())


async def _majority(group: Group) -> int:
    task, problem = TASKS[group.problem.task_type], group.problem
    votes: dict[int, int] = {}
    answers = [trajectory.grade.answer for trajectory in group.trajectories]
    for place, answer in enumerate(answers):
        if answer is None:
            continue
        for first in votes:
            known = answers[first]
            assert known is not None, "only an answer has votes"
            if await task.same(problem, known, answer):
                votes[first] += 1
                break
        else:
            votes[place] = 1
    return max(votes, key=votes.__getitem__) if votes else 0
