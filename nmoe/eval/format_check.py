"""`nmoe eval RUN --format-check`: measures whether a model is ready for reinforcement learning on an environment.

Reinforcement learning amplifies what a model already does sometimes; it has nothing to amplify in what a model almost
never does. Two rules of thumb follow. Below 95% well-formed responses, fine-tune on well-formed examples first. Below
5% correct samples, most groups are all wrong, have equal rewards, and teach nothing. Format and reasoning are measured
separately: a model that solves problems but formats the answer wrongly needs different examples than a model that has
the format but cannot solve them. Reasoning is judged by a rubric (`nmoe.grading.reasoning`), which looks for more than a text
that is not blank.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_environment
from nmoe.config.modes import mode_of
from nmoe.envs.environment import Environment
from nmoe.envs.pools.records import level_of
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.task import SandboxTask
from nmoe.envs.tasks.text import OpenTask
from nmoe.errors import UserError
from nmoe.eval.evaluate import effortful
from nmoe.eval.outcomes import is_correct
from nmoe.eval.subject import open_subject
from nmoe.grading.extraction import from_response, last_boxed
from nmoe.grading.reasoning import REASONING_FAULTS, ReasoningFault, reasoning_fault
from nmoe.runs.resolve import tokens_sampled, trained_on
from nmoe.statistics import binomial_interval, share_interval
from nmoe.trajectory import Group, Trajectory
from nmoe.types import FAILURES, ExpertWeightsForm, Precision, Problem

ENOUGH = 0.95
# Beyond these solve rates most groups are all wrong, or all right.
TOO_HARD, TOO_EASY = 0.05, 0.95
# The most tokens of a completion where nothing else says it: the default of `nmoe rl train`.
TOKENS = 256
# With samples in and out of the form for so many problems, RL can learn the form: SmolLM2-135M did from 8 of 12.
LEARNABLE = 0.5
# Samples of each problem, at temperature 1: the default group of `nmoe rl train`.
SAMPLES = 8
# The easier of MATH's levels say little about how a model reasons.
HARD_LEVELS = ("4", "5")


def format_check(
    checkpoint: Path,
    environment: Path | None,
    problems: int,
    seed: int,
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
    max_tokens: int | None = None,
    reasoning_effort: str | None = None,
    precision: Precision | None = None,
) -> Iterator[str]:
    """Samples one greedy response and several random samples for each problem, and yields the lines of a report on them.

    A completion has at most `max_tokens` tokens, by default the environment's budget, else the run's
    `sampling.max_new_tokens`, else TOKENS: a model that never ends its answer would fill the context. Raises UserError
    if the checkpoint or the environment cannot be loaded.
    """
    settings = environment_of(checkpoint) if environment is None else load_environment(environment)
    named = effortful(settings, reasoning_effort)
    limit = max_tokens or settings.budget.completion_tokens or tokens_sampled(checkpoint) or TOKENS
    with open_subject(
        checkpoint,
        named,
        problems,
        on_held_out=True,
        prepare=hard_problems_alone,
        device=device,
        expert_weights=expert_weights,
        max_tokens=limit,
        precision=precision,
    ) as subject:
        by = "--max-tokens" if subject.max_new_tokens == limit else "what the prompts leave of the model's context"
        yield f"completions of at most {subject.max_new_tokens:,} tokens ({by})"
        groups = subject.sample(problems, mode_of(), seed)
        sampled = subject.sample(problems, mode_of(samples=SAMPLES, temperature=1.0), seed) if has_gold(groups) else []
        yield from report(subject.environment, [group.trajectories[0] for group in groups], sampled)


def environment_of(checkpoint: Path) -> EnvironmentSettings:
    """Returns the settings of the environment that a run was trained on, from the run's directory or one of its checkpoints.

    Raises UserError if there is none.
    """
    settings = trained_on(checkpoint)
    if settings is not None:
        return settings
    raise UserError(f"{checkpoint}: no run that was trained on an environment; name the ENVIRONMENT to check")


def hard_problems_alone(environment: Environment) -> None:
    """Removes all problems from the environment's pool except levels 4 and 5, if it has any of those levels."""
    pool = environment.pool
    if pool.size is not None and any(is_hard(pool.order.at(position)) for position in range(pool.size)):
        pool.keep(is_hard)


def is_hard(problem: Problem) -> bool:
    """Returns whether the problem has level 4 or 5, given as a number or as MATH's "Level 5"."""
    return level_of(problem) in HARD_LEVELS


def has_gold(groups: Sequence[Group]) -> bool:
    """Returns whether every problem has a right answer."""
    return not any(isinstance(TASKS[group.problem.task_type], OpenTask) for group in groups)


def report(
    environment: Environment, trajectories: Sequence[Trajectory], sampled: Sequence[Group] = ()
) -> Iterator[str]:
    """Yields the lines of the report: format and reasoning of one greedy response per problem, and what RL could learn
    from samples.

    Problems without a right answer have no `sampled` groups.
    """
    count = len(trajectories)
    levels = sorted({group for t in trajectories for group in t.problem.groups if group.startswith("level=")})
    formed = list(map(_is_formed, trajectories))
    yield f"{count} problems of {environment.settings.env_id}{' (' + ', '.join(levels) + ')' if levels else ''}, greedy"
    yield f"format     {_rate(formed)} have the form {environment.settings.format!r} and end by themselves"
    yield from _endings(trajectories)
    yield from _reasoning(environment, [trajectory for trajectory in trajectories if _is_formed(trajectory)], count)
    if any(isinstance(TASKS[t.problem.task_type], OpenTask) for t in trajectories):
        yield "           open problems: no answer is right or wrong"
        yield _advice(trajectories, ())
        return
    yield f"           {_rate([t.grade.extras['correctness'] == 1 for t in trajectories])} are right, in form"
    if not any(isinstance(TASKS[t.problem.task_type], SandboxTask) for t in trajectories):
        found = asyncio.run(_right_anywhere(environment, trajectories))
        yield f"           {_rate(found)} have the right answer anywhere (the last box, else the last number)"
    if sampled:
        yield from _learnable(sampled)
    yield _advice(trajectories, sampled)


def _reasoning(environment: Environment, formed: Sequence[Trajectory], count: int) -> Iterator[str]:
    """Yields the share of `count` answers that reason before they answer, in form, and why others in form do not."""
    faults = Counter(_fault_of_reasoning(environment, trajectory) for trajectory in formed)
    rate = _rate([True] * faults[None] + [False] * (count - faults[None]))
    yield f"reasoning  {rate} reason about the problem before they answer, in form"
    if others := ", ".join(f"{faults[name]} {name}" for name in REASONING_FAULTS if faults[name]):
        yield f"           others in form have, before the answer, {others}"


def _fault_of_reasoning(environment: Environment, trajectory: Trajectory) -> ReasoningFault | None:
    """Judges the reasoning of all turns; in plain text, what stands before the box."""
    said = [environment.renderer.said(turn.said_ids) for turn in trajectory.turns]
    thoughts = [reasoning for reasoning, _ in said if reasoning]
    if environment.settings.format == "boxed" and (box := last_boxed(said[-1][1])):
        thoughts = [said[-1][1][: box.start]]
    return reasoning_fault(trajectory.problem.question, "\n".join(thoughts), trajectory.grade.answer)


def _is_formed(trajectory: Trajectory) -> bool:
    return trajectory.grade.extras["format_ok"] == 1


def _endings(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    ended = Counter(t.grade.failure for t in trajectories)
    yield "           ended in " + ", ".join(f"{ended[name]} {name}" for name in FAILURES if ended[name])
    yield f"           {sum(t.sampled_tokens for t in trajectories) / len(trajectories):.0f} tokens in the mean"


def _mixed(rows: Sequence[Sequence[bool]]) -> int:
    """Returns the number of groups in which some samples are true and others false."""
    return sum(any(row) and not all(row) for row in rows)


def _learnable(sampled: Sequence[Group]) -> Iterator[str]:
    """Yields lines on the training signal for RL: how often samples have the format, and how often they are right."""
    formed = [list(map(_is_formed, group.trajectories)) for group in sampled]
    right = [list(map(is_correct, group.trajectories)) for group in sampled]
    samples, mean = len(right[0]), sum(map(sum, right)) / sum(map(len, right))
    shares = [sum(row) / samples for row in formed]
    interval = share_interval(shares)
    yield (
        f"sampled    {sum(shares) / len(shares):.1%} [{interval.low:.1%}, {interval.high:.1%}] of {samples} samples of each "
        "problem at temperature 1 have the form"
    )
    yield from _endings([trajectory for group in sampled for trajectory in group.trajectories])
    yield f"           {_mixed(formed)}/{len(formed)} have samples in and out of form, which is what RL learns the form from"
    yield f"           {mean:.1%} of the samples are right (the solve rate)"
    yield f"           {_rate([any(row) for row in right])} are solved by one of them at least (pass@{samples})"
    yield f"           {_mixed(right)}/{len(right)} have right and wrong samples, which is what RL learns correctness from"


def _advice(greedy: Sequence[Trajectory], sampled: Sequence[Group]) -> str:
    formed, count = sum(map(_is_formed, greedy)), len(greedy)
    drawn = [trajectory for group in sampled for trajectory in group.trajectories]
    right = list(map(is_correct, drawn))
    solved = sum(right) / len(right) if right else None
    interval = binomial_interval(formed, count)
    open_ = interval.low < ENOUGH <= interval.high
    if formed / count >= ENOUGH:
        doubt = f"; {count} problems leave a rate below {ENOUGH:.0%} possible, more --problems decide" if open_ else ""
        if solved is not None and solved < TOO_HARD:
            return (
                f"advice     not RL yet: the form is there in {formed / count:.1%}, but only {solved:.1%} of samples are right, "
                f"below {TOO_HARD:.0%}, and groups that are all wrong teach nothing; fine-tune on worked answers first (nmoe sft), "
                "take easier problems, or more samples of each (batch.group_size)"
            )
        if solved is not None and solved > TOO_EASY:
            return (
                f"advice     harder problems: {solved:.1%} of samples are right, above {TOO_EASY:.0%}, and groups that are "
                "all right teach nothing"
            )
        rate = "" if solved is None else f", and {solved:.1%} of samples are right"
        return f"advice     go straight to RL: the form is there in {formed / count:.1%}, at least {ENOUGH:.0%}{rate}{doubt}"
    doubt = f"; {count} problems leave {ENOUGH:.0%} possible, more --problems decide" if open_ else ""
    cut = sum(trajectory.grade.failure == "truncated" for trajectory in greedy)
    longer = f"more --max-tokens first, since {cut} of {count} were cut; else " if 2 * cut > count else ""
    mixed = _mixed([list(map(_is_formed, group.trajectories)) for group in sampled])
    by_rl = (
        f"; or RL on the form itself, with format in [rubric]: {sum(map(_is_formed, drawn)) / len(drawn):.1%} of samples have it"
        if mixed >= len(sampled) * LEARNABLE and mixed
        else ""
    )
    return (
        f"advice     {longer}SFT first: the form is there in {formed / count:.1%}, below {ENOUGH:.0%}; fine-tune on examples in it "
        f"(nmoe sft){by_rl}{doubt}"
    )


def _rate(hits: Sequence[bool]) -> str:
    interval = binomial_interval(sum(hits), len(hits))
    return f"{sum(hits)}/{len(hits)} = {sum(hits) / len(hits):.1%} [{interval.low:.1%}, {interval.high:.1%}]"


async def _right_anywhere(environment: Environment, trajectories: Sequence[Trajectory]) -> list[bool]:
    return [await _is_right_anywhere(environment, trajectory) for trajectory in trajectories]


async def _is_right_anywhere(environment: Environment, trajectory: Trajectory) -> bool:
    """Returns whether the response contains the right answer anywhere, even if it was cut or has the wrong format.

    A response that was graded correct counts as well.
    """
    if trajectory.grade.extras["correctness"] == 1:
        return True
    text = environment.tokenizer.decode(trajectory.turns[-1].sample.token_ids)
    answer = from_response(text).answer
    if answer is None:
        return False
    verdict = await TASKS[trajectory.problem.task_type].verify(trajectory.problem, Attempt(answer))
    return verdict.outcome == "correct"
