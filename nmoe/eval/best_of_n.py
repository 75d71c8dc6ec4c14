"""Best-of-n: what a scorer's choice among n samples of each problem is worth, beside one greedy sample, the mean sample, the
majority's answer, and the choice of an oracle.

The scorer is a reward model (Stiennon et al. 2020, arXiv:2009.01325, section 4.3) or a verifier (Cobbe et al. 2021,
arXiv:2110.14168, section 4.2); the majority is that of self-consistency (Wang et al. 2022, arXiv:2203.11171, section 2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nmoe.envs.environment import Environment
from nmoe.envs.scorer import Scorer
from nmoe.eval.evaluate import Evaluation, is_correct, majorities, share_of, summarise
from nmoe.eval.statistics import paired_difference
from nmoe.types import Group, Trajectory

UNANSWERED = float("-inf")
"""The score of a sample that says nothing: any other is chosen before it."""


def score_groups(environment: Environment, groups: Sequence[Group], scorer: Scorer) -> list[list[float]]:
    """The scorer's word on what every sample says, by group. Raises what the scorer raises, and ValueError for a NaN."""

    async def score(trajectory: Trajectory) -> float:
        answer = environment.answer_text(trajectory.turns[-1].sample.token_ids)
        if answer is None:
            return UNANSWERED
        value = await scorer.score(environment.messages(trajectory.problem), answer)
        if value != value:
            raise ValueError(f"problem {trajectory.problem.id}: the scorer gave NaN to {answer!r}")
        return value

    async def everything() -> list[list[float]]:
        rows = [asyncio.gather(*map(score, group.trajectories)) for group in groups]
        return [list(row) for row in await asyncio.gather(*rows)]

    return asyncio.run(everything())


def best_of_n(
    greedy: Sequence[Group], groups: Sequence[Group], scores: Sequence[Sequence[float]], env_id: str, temperature: float
) -> list[Evaluation]:
    """Evaluations over the same problems: one greedy sample; of n the mean, pass@k up to any of n (an oracle's choice), and
    the answer that most give; the sample that scored highest; and the scorer's choice less the majority's, problem by problem.
    Of several that tie the first sampled is chosen. `greedy` has one sample of each problem, `groups` n, `scores` a number for
    each."""
    samples = len(groups[0].trajectories)
    rows = [[is_correct(trajectory) for trajectory in group.trajectories] for group in groups]
    voted = [row[place] for row, place in zip(rows, majorities(groups), strict=True)]
    chosen = [row[values.index(max(values))] for row, values in zip(rows, scores, strict=True)]
    low, high = -1.0, 1.0  # a single problem says nothing of the spread between problems
    if len(rows) > 1:
        difference = paired_difference(list(map(float, voted)), list(map(float, chosen)))
        low, high = max(low, difference.interval.low), min(high, difference.interval.high)
    gain = (sum(chosen) - sum(voted)) / len(rows)
    return [
        summarise(greedy, env_id, 0.0)[0],
        *(one for one in summarise(groups, env_id, temperature) if one.dataset == env_id),
        share_of(f"best_of@{samples}", env_id, chosen),
        Evaluation(f"best_of@{samples} - majority@{samples}", env_id, len(rows), gain, low, high),
    ]
