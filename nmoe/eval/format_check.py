"""`nmoe eval RUN --format-check`: does a model have the environment's form already, or should it be shown the form first?

Reinforcement learning can raise what happens now and then, and a form that a model hardly ever hits gives it nothing to raise.
The usual rule: at 95% of the form or above go straight to RL, below that fine-tune on examples of it first. Form and reasoning
are measured apart, because a model that solves problems and puts the answer in the wrong place needs other examples than
one that has the form and nothing to say.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from nmoe.config.environment import EnvironmentSettings
from nmoe.errors import UserError
from nmoe.eval.statistics import wilson
from nmoe.eval.subject import open_subject
from nmoe.rl.environment import Environment
from nmoe.rl.failures import FAILURES
from nmoe.rl.grading.extraction import from_response
from nmoe.rl.problem import Problem
from nmoe.rl.rollout.trajectory import Trajectory
from nmoe.rl.tasks import TASKS, Attempt
from nmoe.runs.resolve import trained_on

ENOUGH = 0.95
# Where problems have MATH's levels, its easier ones say little of how a model reasons.
HARD_LEVELS = ("4", "5")


def format_check(checkpoint: Path, environment: Path | None, problems: int, seed: int) -> Iterator[str]:
    """Greedy answers to so many problems, and what they say of form and reasoning, line by line. Raises UserError for what can not
    be loaded."""
    named: Path | EnvironmentSettings = environment or environment_of(checkpoint)
    with open_subject(checkpoint, named, problems, on_held_out=True, prepare=hard_problems_alone) as subject:
        groups = subject.sample(problems, 1, 0.0, seed)
        trajectories = [group.trajectories[0] for group in groups]
        yield from report(subject.environment, trajectories)


def environment_of(checkpoint: Path) -> EnvironmentSettings:
    """The environment that a run trained on, for the run's directory or one of its checkpoints. Raises UserError without
    one."""
    settings = trained_on(checkpoint)
    if settings is not None:
        return settings
    raise UserError(f"{checkpoint}: no run that was trained on an environment; name the ENVIRONMENT to check")


def hard_problems_alone(environment: Environment) -> None:
    """Keeps levels 4 and 5 of problems that have levels, where there are such."""
    pool = environment.pool
    if pool.size is not None and any(is_hard(pool.order.at(place)) for place in range(pool.size)):
        pool.keep(is_hard)


def is_hard(problem: Problem) -> bool:
    """Whether its record says level 4 or 5, as a number or in MATH's words "Level 5"."""
    return str(problem.metadata.get("level", "")).strip().removeprefix("Level").strip() in HARD_LEVELS


def report(environment: Environment, trajectories: Sequence[Trajectory]) -> Iterator[str]:
    """What the responses, one to each problem, say of form and reasoning."""
    count = len(trajectories)
    levels = sorted({group for t in trajectories for group in t.problem.groups if group.startswith("level=")})
    formed = [t.grade.extras["format_ok"] == 1 for t in trajectories]
    ended = Counter(t.grade.failure for t in trajectories)
    tokens = sum(t.sampled_tokens for t in trajectories) / count
    yield f"{count} problems of {environment.settings.env_id}{' (' + ', '.join(levels) + ')' if levels else ''}, greedy"
    yield f"format     {_rate(formed)} have the form {environment.settings.format!r} and end by themselves"
    yield "           ended in " + ", ".join(f"{ended[name]} {name}" for name in FAILURES if ended[name])
    yield f"           {tokens:.0f} tokens in the mean"
    yield f"reasoning  {_rate([t.grade.extras['reasoning_ok'] == 1 for t in trajectories])} reason before they answer, in form"
    if not all(TASKS[t.problem.task_type].has_gold for t in trajectories):
        yield "           open problems: no answer is right or wrong"
        yield _advice(sum(formed), count)
        return
    yield f"           {_rate([t.grade.extras['correctness'] == 1 for t in trajectories])} are right, in form"
    if not any(TASKS[t.problem.task_type].needs_sandbox for t in trajectories):
        found = asyncio.run(_right_anywhere(environment, trajectories))
        yield f"           {_rate(found)} have the right answer anywhere (the last box, else the last number)"
    yield _advice(sum(formed), count)


def _advice(formed: int, count: int) -> str:
    interval = wilson(formed, count)
    open_ = interval.low < ENOUGH <= interval.high
    if formed / count >= ENOUGH:
        doubt = f"; {count} problems leave a rate below {ENOUGH:.0%} possible, more --problems tell" if open_ else ""
        return f"advice     go straight to RL: the form is there in {formed / count:.1%}, at least {ENOUGH:.0%}{doubt}"
    doubt = f"; {count} problems leave {ENOUGH:.0%} possible, more --problems tell" if open_ else ""
    return (
        f"advice     SFT first: the form is there in {formed / count:.1%}, below {ENOUGH:.0%}; fine-tune on examples in it "
        f"(nmoe sft){doubt}"
    )


def _rate(hits: Sequence[bool]) -> str:
    interval = wilson(sum(hits), len(hits))
    return f"{sum(hits)}/{len(hits)} = {sum(hits) / len(hits):.1%} [{interval.low:.1%}, {interval.high:.1%}]"


async def _right_anywhere(environment: Environment, trajectories: Sequence[Trajectory]) -> list[bool]:
    return [await _is_right_anywhere(environment, trajectory) for trajectory in trajectories]


async def _is_right_anywhere(environment: Environment, trajectory: Trajectory) -> bool:
    """Whether the answer is right wherever it stands and however the response ended; what a well-formed one was credited with
    counts as well."""
    if trajectory.grade.extras["correctness"] == 1:
        return True
    text = environment.text(trajectory.turns[-1].sample.token_ids)
    answer = from_response(text).answer
    if answer is None:
        return False
    verdict = await TASKS[trajectory.problem.task_type].verify(trajectory.problem, Attempt(answer))
    return verdict.outcome == "correct"
