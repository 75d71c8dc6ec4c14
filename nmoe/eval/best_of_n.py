"""Best-of-n evaluation: lets a scorer choose one of n sampled answers, and compares it with other ways to choose.

The others are one greedy sample, the mean over the samples, the majority's answer, and an oracle that knows the right
one. The scorer is a reward model (Stiennon et al. 2020, arXiv:2009.01325, section 4.3) or a verifier (Cobbe et al.
2021, arXiv:2110.14168, section 4.2). The majority vote is self-consistency (Wang et al. 2022, arXiv:2203.11171, section
2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nmoe.envs.environment import Environment
from nmoe.envs.rewards.reward import Scorer
from nmoe.eval.evaluate import Evaluation, share_of, summarise_outcomes
from nmoe.eval.outcomes import Outcome
from nmoe.runs.waiting import wait_for
from nmoe.statistics import paired_difference
from nmoe.trajectory import Group, Trajectory

UNANSWERED = float("-inf")
"""The score of a sample without an answer: minus infinity, so that every sample with an answer is preferred."""


def score_groups(environment: Environment, groups: Sequence[Group], scorer: Scorer) -> list[list[float]]:
    """Scores every sample with `scorer`; returns one list per group (the samples of one problem), in the order of the samples.

    A sample without an answer gets `UNANSWERED`. Raises any error of the scorer, and ValueError if it returns NaN.
    """

    async def score(trajectory: Trajectory) -> float:
        answer = environment.grader.answer_text(trajectory.turns[-1].sample.token_ids)
        if answer is None:
            return UNANSWERED
        value = await scorer.score(environment.prompts.messages(trajectory.problem), answer)
        if value != value:
            raise ValueError(f"problem {trajectory.problem.id}: the scorer gave NaN to {answer!r}")
        return value

    async def everything() -> list[list[float]]:
        rows = [asyncio.gather(*map(score, group.trajectories)) for group in groups]
        return [list(row) for row in await asyncio.gather(*rows)]

    return wait_for(everything())


def best_of_n(
    greedy: Sequence[Outcome], outcomes: Sequence[Outcome], env_id: str, temperature: float
) -> list[Evaluation]:
    """Returns the evaluations that compare the choice of a scorer with other choices, over the same problems.

    `greedy` has one greedy sample of each problem, and `outcomes` n samples of each with their scores. The results are:
    greedy pass@1; of the n samples the mean accuracy, pass@k for k up to n (pass@n is the choice of an oracle) and the
    accuracy of the majority vote; the accuracy of the sample with the highest score; and the last minus the majority
    vote, paired by problem. If scores tie, the sample that was drawn first is chosen.
    """
    samples = len(outcomes[0].correct)
    voted = [one.correct[one.voted] for one in outcomes]
    chosen = [one.correct[one.scores.index(max(one.scores))] for one in outcomes]
    gain = paired_difference(list(map(float, voted)), list(map(float, chosen)))
    return [
        summarise_outcomes(greedy, env_id, 0.0)[0],
        *(one for one in summarise_outcomes(outcomes, env_id, temperature) if one.dataset == env_id),
        share_of(f"best_of@{samples}", env_id, chosen),
        Evaluation(
            f"best_of@{samples} - sampling_pass@{samples}",
            env_id,
            len(outcomes),
            gain.value,
            gain.interval.low,
            gain.interval.high,
        ),
    ]
