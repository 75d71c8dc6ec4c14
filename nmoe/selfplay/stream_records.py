"""Writes the records of a batch of self-play: lines of training data, counts, metrics and replay bundles.

A line of training data has tokens with their behaviour log-probabilities, and the text, for people and other trainers.
The files `proof_verifier_train.jsonl` and `proof_meta_verifier_train.jsonl` are also pools for the tasks
`proof_verification` and `meta_verification` (problem_field "problem", answer_field "score").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from nmoe.envs.tasks.proofs import read_score
from nmoe.rollout.recorder import SAMPLED, ReplayRecorder
from nmoe.selfplay.play import Attempted, JudgedEvaluation
from nmoe.selfplay.streams import GENERATOR, META_VERIFIER, VERIFIER, Streams
from nmoe.trajectory import Trajectory

ROLES = {"proof_generation": "generator", "proof_verification": "verifier", "meta_verification": "meta_verifier"}


def record(streams: Streams, recorder: ReplayRecorder, step: int, round_: int, attempts: Sequence[Attempted]) -> None:
    """Appends a step's lines to the streams of training data, counts outcomes, and writes replay bundles. Raises StorageError."""
    at = {"step": step, "round": round_}
    streams.append(VERIFIER, ({**at, **_verifier_line(one)} for one in attempts if one.score is not None))
    streams.append(META_VERIFIER, ({**at, **line} for one in attempts for line in _meta_lines(one)))
    streams.append(GENERATOR, ({**at, **line} for one in attempts if (line := _generator_line(one)) is not None))
    streams.count("outcomes", Counter(map(outcome, attempts)))
    for role, counts in failures(attempts).items():
        streams.count(f"failures/{role}", counts)
    for attempt in attempts:
        _keep(recorder, step, attempt)


def outcome(attempt: Attempted) -> str:
    """Returns a proof's outcome, with the score if it was accepted: `accepted_0.5`, `unconfirmed`, `no_proof`, ..."""
    return attempt.outcome if attempt.score is None else f"{attempt.outcome}_{float(attempt.score):g}"


def failures(attempts: Iterable[Attempted]) -> dict[str, Counter[str]]:
    """Counts the failure names of completions, by role: `{"generator": Counter({"ok": 7, "truncated": 1}), ...}`."""
    counts: dict[str, Counter[str]] = {role: Counter() for role in ROLES.values()}
    for attempt in attempts:
        for trajectory in attempt.trajectories:
            counts[ROLES[trajectory.problem.task_type]][trajectory.grade.failure] += 1
    return counts


def metrics(attempts: Sequence[Attempted]) -> dict[str, float]:
    """Returns a step's metrics: shares of its proofs by outcome, mean scores and rewards, the share of confirmed claims among the
    decided ones, and the share of undecided claims.
    """
    outcomes = Counter(attempt.outcome for attempt in attempts)
    values = {f"proofs_{name}": count / len(attempts) for name, count in sorted(outcomes.items())}
    accepted = [attempt for attempt in attempts if attempt.score is not None]
    claims = [one.analysis.stands for attempt in attempts for one in attempt.analyses if one.analysis.claims]
    rewards = [attempt.verifier_reward(one) for attempt in accepted for one in attempt.analyses]
    means = {
        "accepted_score_mean": [float(attempt.score) for attempt in accepted if attempt.score is not None],
        "generator_reward_mean": [reward for one in attempts if (reward := one.generator_reward()) is not None],
        "verifier_reward_mean": [reward for reward in rewards if reward is not None],
        "claims_confirmed": [float(stands) for stands in claims if stands is not None],
        "claims_undecided": [float(stands is None) for stands in claims],
    }
    values |= {name: sum(found) / len(found) for name, found in means.items() if found}
    return {"proofs": float(len(attempts)), "claims": float(len(claims)), "proofs_accepted": 0.0, **values}


def _verifier_line(attempt: Attempted) -> dict[str, Any]:
    """Returns the training record of an accepted proof: its score, and every verification with its reward. `evidence` marks
    verifications that give the accepted score, if it is below 1 only the confirmed ones.
    """
    assert attempt.score is not None
    assert attempt.acceptance is not None
    evidence = attempt.acceptance.evidence
    return {
        **_proof(attempt),
        "score": float(attempt.score),
        "prompt_ids": list(attempt.analyses[0].trajectory.prompt_ids),
        "analyses": [
            {
                **_evaluation(one),
                "confirmed": one.analysis.stands if one.analysis.claims else None,
                "evidence": index in evidence,
                "reward": attempt.verifier_reward(one),
                **_tokens(one.trajectory),
            }
            for index, one in enumerate(attempt.analyses)
        ],
    }


def _meta_lines(attempt: Attempted) -> Iterator[dict[str, Any]]:
    """Yields a training record for each evaluation whose claims are known to be true or false, by the score of the proof or by
    the majority of the checks. `score` is then 1 or 0, and `settled` says whether the proof's score settles it.
    """
    for name, one in attempt.judged:
        if one.checks and one.label is not None:
            yield {
                **_proof(attempt),
                **_evaluation(one),
                "id": f"{_id(attempt)}/{name}",
                "score": float(one.label),
                "settled": one.true is not None,
                "confirmed": one.analysis.stands,
                "prompt_ids": list(one.checks[0].prompt_ids),
                "checks": [{"score": _number(_score(check)), **_tokens(check)} for check in one.checks],
            }


def _generator_line(attempt: Attempted) -> dict[str, Any] | None:
    """Returns the training record of a proof; None if its reward is unknown."""
    reward = attempt.generator_reward()
    if reward is None:
        return None
    proof = attempt.proof
    return {
        **_proof(attempt),
        "group": attempt.trajectory.problem.id,
        "self_evaluation": None if proof is None else proof.evaluation.text,
        "self_score": None if proof is None else float(proof.evaluation.score),
        "score": _number(attempt.score),
        "reward": reward,
        "prompt_ids": list(attempt.trajectory.prompt_ids),
        **_tokens(attempt.trajectory),
    }


def _proof(attempt: Attempted) -> dict[str, Any]:
    return {
        "id": _id(attempt),
        "problem": attempt.trajectory.problem.metadata["problem"],
        "proof": None if attempt.proof is None else attempt.proof.solution,
    }


def _id(attempt: Attempted) -> str:
    return f"{attempt.trajectory.problem.id}/{attempt.trajectory.index}"


def _evaluation(judged: JudgedEvaluation) -> dict[str, Any]:
    evaluation = judged.evaluation
    return {
        "evaluation": None if evaluation is None else evaluation.text,
        "evaluation_score": None if evaluation is None else float(evaluation.score),
    }


def _tokens(trajectory: Trajectory) -> dict[str, Any]:
    """Returns all tokens after the prompt with their columns. The mask is 1 for sampled tokens, 0 for tool results."""
    return {
        "token_ids": trajectory.token_ids,
        "mask": trajectory.mask,
        "logprobs": trajectory.logprobs,
        "versions": trajectory.versions,
    }


def _score(check: Trajectory) -> Fraction | None:
    return read_score(check.grade.answer) if check.grade.answer else None


def _number(score: Fraction | None) -> float | None:
    return None if score is None else float(score)


def _keep(recorder: ReplayRecorder, step: int, attempt: Attempted) -> None:
    """Writes the replay bundles of an accepted proof and its evidence, and of a random fraction of the other trajectories."""
    accepted = [] if attempt.score is None else [attempt.trajectory, *_evidence(attempt)]
    for trajectory in attempt.trajectories:
        if any(trajectory is one for one in accepted):
            recorder.keep(step, trajectory, f"accepted_{ROLES[trajectory.problem.task_type]}")
        elif recorder.sampled(step, trajectory):
            recorder.keep(step, trajectory, SAMPLED)


def _evidence(attempt: Attempted) -> list[Trajectory]:
    assert attempt.acceptance is not None
    return [attempt.analyses[index].trajectory for index in attempt.acceptance.evidence]
