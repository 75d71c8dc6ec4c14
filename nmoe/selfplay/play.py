"""Plays one batch of self-play: proofs are written, each is verified n times, and the defects that verifications claim are checked
m times.

Every completion is an ordinary trajectory, sampled and parsed by the environment; this file only decides which role is asked
what. Requests of one kind run side by side, since the next kind needs all their answers.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.proofs import UNKNOWN, Proof, WrittenEvaluation, read_evaluation, read_proof, read_score
from nmoe.rollout.collector import Collector
from nmoe.selfplay.acceptance import (
    Acceptance,
    Analysis,
    accept,
    generator_reward,
    is_true,
    meta_score,
    verifier_reward,
)
from nmoe.trajectory import Trajectory
from nmoe.types import Problem, Sampling


@dataclass
class JudgedEvaluation:
    """An evaluation of a proof, by a verifier or by the proof's author, with the meta-verifications (`checks`) of its claims.
    `asked` counts the requested checks: 0 if no defect is claimed, the text is no evaluation, or the question does not fit the
    context. `checks` excludes checks lost to the infrastructure. `true`: whether its claim is, as far as the proof's accepted score
    settles it.
    """

    trajectory: Trajectory
    evaluation: WrittenEvaluation | None
    checks: list[Trajectory] = field(default_factory=list)
    asked: int = 0
    true: bool | None = None

    @property
    def analysis(self) -> Analysis:
        """The evaluation in the form of the acceptance rule; a lost check counts as an unreadable one."""
        scores = [read_score(check.grade.answer) if check.grade.answer else None for check in self.checks]
        lost = [None] * (self.asked - len(self.checks))
        return Analysis(None if self.evaluation is None else self.evaluation.score, (*scores, *lost))

    @property
    def label(self) -> bool | None:
        """Whether the claim is true: as the proof's score settles it, else as the majority of its checks says; None without one."""
        return self.analysis.stands if self.true is None else self.true

    @property
    def meta(self) -> float | None:
        """R_meta, the factor for honest claims: 1 if no defect is claimed; 0 if the claim is too long to be checked within the
        context, which is the author's fault; None if all requested checks are lost or unreadable.
        """
        if not self.analysis.claims:
            return 1.0
        return meta_score(self.analysis.checks) if self.asked else 0.0


@dataclass
class Attempted:
    """One proof of one problem, with its evaluations.

    `outcome` is the result of the acceptance rule, or "no_proof" for a completion that is not a proof, "overlong" for a
    proof that is too long to be verified, "lost" after an infrastructure failure. `lost` counts the lost verifications.
    """

    trajectory: Trajectory
    proof: Proof | None
    outcome: str = "no_proof"
    own: JudgedEvaluation | None = None
    analyses: list[JudgedEvaluation] = field(default_factory=list)
    lost: int = 0
    acceptance: Acceptance | None = None

    @property
    def score(self) -> Fraction | None:
        """The score that the proof was accepted with; None if it was not accepted."""
        return None if self.acceptance is None else self.acceptance.score

    @property
    def asked(self) -> int:
        """The number of verifications that were requested, with those that were lost."""
        return len(self.analyses) + self.lost

    @property
    def doubtful(self) -> bool:
        """Whether the verifications disagree too much: the proof was not accepted, or with the score of a minority of them."""
        if self.acceptance is None:
            return False
        return self.score is None or (self.score < 1 and 2 * len(self.acceptance.evidence) < self.asked)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories about the proof: the proof, its verifications, and the meta-verifications of these and of the
        self-evaluation.
        """
        return [
            self.trajectory,
            *(one.trajectory for one in self.analyses),
            *(check for _, one in self.judged for check in one.checks),
        ]

    @property
    def judged(self) -> list[tuple[str, JudgedEvaluation]]:
        """The evaluations whose claims are checked, with their names: own, v0, v1, ..."""
        own = [] if self.own is None else [("own", self.own)]
        return [*own, *((f"v{n}", one) for n, one in enumerate(self.analyses))]

    @property
    def repeated(self) -> set[str]:
        """The texts of the verifications with the accepted score that no other text among them is repeated more often than."""
        evidence = [] if self.acceptance is None else [self.analyses[index] for index in self.acceptance.evidence]
        counts = Counter(one.evaluation.text for one in evidence if one.evaluation is not None)
        return {text for text, count in counts.items() if count == max(counts.values())}

    def generator_reward(self) -> float | None:
        """Returns the proof's reward, 0 for a completion that is no proof. None if it is unknown: the proof was not accepted, or
        the checks of its self-evaluation are lost or unreadable.
        """
        if self.outcome == "no_proof":
            return 0.0
        if self.score is None or self.proof is None or self.own is None or self.own.meta is None:
            return None
        return generator_reward(self.proof.evaluation.score, self.score, self.own.meta)

    def verifier_reward(self, judged: JudgedEvaluation) -> float | None:
        """Returns the reward of one verification of an accepted proof, 0 for a completion that is no evaluation; None if the checks
        of its claims are lost or unreadable."""
        assert self.score is not None, "only analyses of an accepted proof have a reward"
        if judged.evaluation is None:
            return 0.0
        return None if judged.meta is None else verifier_reward(judged.evaluation.score, self.score, judged.meta)


@dataclass(frozen=True)
class Judges:
    """How many verifications a proof gets, how many checks a claim gets, how many confirmations a score needs, and how many
    verifications are added for a proof in doubt: `Judges(verifications=8, checks=3, confirmations=2, more=8)`.
    """

    verifications: int
    checks: int
    confirmations: int
    more: int


class SelfPlay:
    """Samples and judges proofs: plays generator, verifier and meta-verifier, each with its own collector over one environment; the
    collectors may share an engine.
    """

    def __init__(
        self,
        environment: Environment,
        generator: Collector,
        verifier: Collector,
        meta_verifier: Collector,
        proofs: int,
        sampling: Sampling,
        judges: Judges,
        context_tokens: int,
    ) -> None:
        """Makes the player of the three roles. `proofs` is the number of proofs per problem.

        `judges` has the numbers of verifications and checks. All completions are sampled with `sampling`.
        """
        self._environment = environment
        self._generator, self._verifier, self._meta_verifier = generator, verifier, meta_verifier
        self._proofs, self._sampling = proofs, sampling
        self._judges, self._context_tokens = judges, context_tokens

    def play(self, problems: Sequence[Problem], key: tuple[str | int, ...]) -> list[Attempted]:
        """Samples and judges proofs of the problems, and returns them in order. `key` names the batch: samples depend only on the
        key, the problems and the weights.
        """
        groups = self._generator.collect(problems, self._proofs, self._sampling, (*key, "generator")).groups
        attempts = [self._read(trajectory) for group in groups for trajectory in group.trajectories]
        self._judge(attempts, self._judges.verifications, "", key)
        doubtful = [attempt for attempt in attempts if attempt.doubtful]
        if doubtful and self._judges.more:
            self._judge(doubtful, self._judges.more, "/more", (*key, "more"))
        asyncio.run(self._grade([attempt for attempt in attempts if attempt.acceptance is not None]))
        return attempts

    def _judge(self, attempts: Sequence[Attempted], count: int, name: str, key: tuple[str | int, ...]) -> None:
        """Adds `count` verifications to every proof, checks their claims, and decides with which score each proof is accepted."""
        self._verify(attempts, count, name, key)
        judged = [(one, attempt, name) for attempt in attempts for name, one in attempt.judged if not one.asked]
        self._check(judged, key)
        for attempt in attempts:
            if attempt.analyses:
                # A proof that is verified more often needs more confirmations, in proportion.
                needed = math.ceil(self._judges.confirmations * attempt.asked / self._judges.verifications)
                lost = [Analysis(None)] * attempt.lost
                attempt.acceptance = accept([*(one.analysis for one in attempt.analyses), *lost], needed)
                attempt.outcome = attempt.acceptance.outcome

    def _read(self, trajectory: Trajectory) -> Attempted:
        if not trajectory.trainable:
            return Attempted(trajectory, None, "lost")
        # Truncated and malformed completions have no verdict and are no proof.
        proof = None if trajectory.grade.verdict is None else read_proof(trajectory.grade.answer)
        attempt = Attempted(trajectory, proof)
        if proof is not None:
            attempt.own = JudgedEvaluation(trajectory, proof.evaluation)
        return attempt

    def _verify(self, attempts: Sequence[Attempted], count: int, name: str, key: tuple[str | int, ...]) -> None:
        """Samples `count` verifications of every proof; a proof that leaves no room for one in the context becomes "overlong", and
        one whose verifications are all lost becomes "lost"."""
        asked = []
        for attempt in attempts:
            if attempt.proof is not None:
                problem = self._posed("proof_verification", attempt, name, {"proof": attempt.proof.solution})
                if self._fits(problem):
                    asked.append((attempt, problem))
                else:
                    attempt.outcome, attempt.own = "overlong", None
        problems = [problem for _, problem in asked]
        groups = self._verifier.collect(problems, count, self._sampling, (*key, "verifier")).groups
        for (attempt, _), group in zip(asked, groups, strict=True):
            kept = [one for one in group.trajectories if one.trainable]
            attempt.analyses += [JudgedEvaluation(one, self._evaluation(one)) for one in kept]
            attempt.lost += len(group.trajectories) - len(kept)
            if not attempt.analyses:
                attempt.outcome, attempt.own = "lost", None

    def _check(self, judged: Sequence[tuple[JudgedEvaluation, Attempted, str]], key: tuple[str | int, ...]) -> None:
        """Samples meta-verifications of every evaluation that claims a defect, if the question fits the context."""
        asked = []
        for one, attempt, name in judged:
            if not one.analysis.claims:
                continue
            assert attempt.proof is not None, "only proofs are judged"
            assert one.evaluation is not None, "only an evaluation claims a defect"
            fields = {"proof": attempt.proof.solution, "evaluation": one.evaluation.text}
            problem = self._posed("meta_verification", attempt, f"/{name}", fields)
            if self._fits(problem):
                one.asked = self._judges.checks
                asked.append((one, problem))
        problems, count = [problem for _, problem in asked], self._judges.checks
        groups = self._meta_verifier.collect(problems, count, self._sampling, (*key, "meta_verifier")).groups
        for (one, _), group in zip(asked, groups, strict=True):
            one.checks = [check for check in group.trajectories if check.trainable]

    async def _grade(self, attempts: Sequence[Attempted]) -> None:
        """Grades the verifications of each proof by the score that it was accepted with, and the checks by what that settles, or
        by their majority where it settles nothing."""
        for attempt in attempts:
            repeated = attempt.repeated
            for _, one in attempt.judged:
                if one.analysis.claims and one.evaluation is not None:
                    one.true = is_true(one.analysis, attempt.score, one.evaluation.text in repeated)
                label = one.label
                if label is not None:
                    one.checks = [await self._graded(check, Fraction(label)) for check in one.checks]
            if attempt.score is not None:
                for one in attempt.analyses:
                    one.trajectory = await self._graded(one.trajectory, attempt.score)

    def _posed(self, task_type: str, attempt: Attempted, name: str, record: Mapping[str, str]) -> Problem:
        """Returns a problem of this task type that asks about a proof; its gold answer is unknown."""
        problem = attempt.trajectory.problem
        question, gold, metadata = TASKS[task_type].pose(str(problem.metadata["problem"]), UNKNOWN, record)
        id_ = f"{problem.id}/{attempt.trajectory.index}{name}"
        return Problem(id_, task_type, question, gold, problem.source, metadata)

    def _fits(self, problem: Problem) -> bool:
        return self._environment.prompts.fits(problem, self._context_tokens, self._sampling.max_new_tokens)

    def _evaluation(self, trajectory: Trajectory) -> WrittenEvaluation | None:
        """Parses a verifier's completion; None if it is malformed or truncated."""
        if trajectory.grade.verdict is None:
            return None
        return read_evaluation(*self._environment.renderer.said(trajectory.turns[-1].sample.token_ids))

    async def _graded(self, trajectory: Trajectory, gold: Fraction) -> Trajectory:
        """Grades the trajectory again, with the score that it should have given as the gold answer."""
        problem = replace(trajectory.problem, gold=f"{float(gold):g}")
        if trajectory.grade.verdict is None:
            return replace(trajectory, problem=problem)  # without an answer there is nothing to compare
        grade = await self._environment.grader.grade(
            problem, trajectory.turns, trajectory.sampling.max_new_tokens, tool_events=trajectory.tool_events
        )
        return replace(trajectory, problem=problem, grade=grade)
