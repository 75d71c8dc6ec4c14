r"""DeepSeek-Math-V2's inputs as problems, and its rated proofs through the pipeline: what is read, and which score follows.

A file of proofs has for each problem the proof, a human rating, and the mean score of 64 verifications. These are not recorded; the
tests write 64 that have the mean.
"""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.tables.pools import SelfplayPool
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.pools.selfplay import open_problems
from nmoe.envs.tasks.proofs import CLOSING, OPENING, WrittenEvaluation, read_evaluation, read_proof
from nmoe.rollout.collector import Collector
from nmoe.selfplay.acceptance import Analysis, accept
from nmoe.selfplay.play import Judges, SelfPlay
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Sampling

DATA = Path(__file__).parents[3] / "shared/eval_data/math_v2"
VERIFICATIONS = 64
FULL = {"IMO-ProofBench-Basic": 7, "IMO-ProofBench-Advanced": 7, "IMO2025": 7, "CMO2024": 21, "Putnam2024": 10}
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="shared/eval_data is not beside the repository")


@cache
def rated(name: str) -> list[dict[str, Any]]:
    return list(map(json.loads, (DATA / f"proofs/{name}.jsonl").read_text().splitlines()))


def scores_of(rating: float, halves: bool) -> list[Fraction]:
    """64 scores with this mean: with as many of 0.5 as there can be, or at most one of them."""
    points = Fraction(rating) * 2 * VERIFICATIONS
    assert points.denominator == 1, "the mean of 64 scores of 0, 0.5 and 1"
    ones = max(0, int(points) - VERIFICATIONS) if halves else int(points) // 2
    half = int(points) - 2 * ones
    return [Fraction(1)] * ones + [Fraction(1, 2)] * half + [Fraction(0)] * (VERIFICATIONS - ones - half)


def published(score: Fraction) -> str:
    """An evaluation in the form that the published prompts ask for."""
    return f"{OPENING}\nThe lemma in step 2 ...\n\n{CLOSING.replace('overall', 'overal')}\n\\boxed{{{float(score):g}}}"


@pytest.mark.parametrize(("name", "size"), [("CMO2024", 6), ("CMO2025", 6), ("IMO2025", 6), ("Putnam2024", 12)])
def test_the_inputs_are_problems_without_their_answers(name: str, size: int) -> None:
    path = DATA / f"{name}.json"
    records = json.loads(path.read_text())
    order = open_problems("open", SelfplayPool(type="selfplay", source=f"deepseek_math_v2_inputs:{path}"))
    assert (order.records, order.duplicates, order.size) == (size, 0, size)
    problems = sorted((order.at(place) for place in range(size)), key=lambda problem: problem.metadata["record"])
    for record, problem in zip(records, problems, strict=True):
        assert (problem.metadata["problem"], problem.metadata["input_id"]) == (
            record["question"].strip(),
            str(record["id"]),
        )
        assert problem.question.endswith(f"## Problem\n{record['question'].strip()}")
        assert problem.gold == ""
        assert len(record["answer"]) < 10 or record["answer"] not in repr(problem)


def test_every_rated_proof_is_read_as_it_was_written() -> None:
    proofs = [one["model_prediction"]["proof"] for name in FULL for one in rated(name)]
    assert len(proofs) == 84
    for text in proofs:
        read = read_proof(f"## Solution\n{text}\n\n## Self Evaluation\n{published(Fraction(1, 2))}")
        assert read is not None
        assert read.solution == text.strip()
        assert read.evaluation.score == Fraction(1, 2)


@pytest.mark.parametrize("halves", [False, True])
def test_ratings_are_means_of_scores_that_are_read_and_decide_as_people_do(halves: bool) -> None:
    """With every claim confirmed, a proof is accepted with 1 exactly if its rating is 1. People gave all points to 65 of these 72
    proofs, and to none of the other 12."""
    full_marks = {True: 0, False: 0}
    for name, points in FULL.items():
        for record in rated(name):
            prediction = record["model_prediction"]
            evaluations = [
                read_evaluation(None, published(score))
                for score in scores_of(prediction["average_automatic_rating"], halves)
            ]
            scores = [one.score for one in evaluations if one is not None]
            assert float(sum(scores)) / VERIFICATIONS == prediction["average_automatic_rating"]
            result = accept([Analysis(score, (Fraction(1),) * 3 * (score < 1)) for score in scores], 1)
            assert result.score == min(scores)
            full_marks[result.score == 1] += prediction["human_rating"] == points
    assert full_marks == {True: 65, False: 0}


def test_rated_proofs_go_through_the_pipeline(tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony) -> None:
    """The generator writes the rated proofs of CMO 2024, and 64 verifiers score them as they were rated."""
    source = f"deepseek_math_v2_inputs:{DATA / 'CMO2024.json'}"
    settings = {
        "env_id": "play",
        "version": "1",
        "format": "harmony",
        "task_pool": {"type": "selfplay", "source": source},
    }
    environment = Environment.from_settings(parse(settings, EnvironmentSettings, Locator(Place("test"))), tokenizer)
    records = {one["question"].strip(): one["model_prediction"] for one in rated("CMO2024")}
    of_request: dict[str, tuple[str, list[Fraction]]] = {}

    def script(request: Request, index: int) -> list[int]:
        if request.request_id not in of_request:
            prompt = tokenizer.decode(request.prompt_ids)
            record = next(one for question, one in records.items() if question in prompt)
            role = (
                "check" if "## Evaluation\n" in prompt else "verify" if record["proof"].strip() in prompt else "solve"
            )
            of_request[request.request_id] = role, scores_of(record["average_automatic_rating"], True)
            proofs[request.request_id] = record["proof"]
        role, scores = of_request[request.request_id]
        answer = {
            "check": lambda: "1",
            "verify": lambda: published(scores[index]),
            "solve": lambda: (
                f"## Solution\n{proofs[request.request_id]}\n\n## Self Evaluation\n{published(Fraction(1))}"
            ),
        }[role]()
        return harmony.render_completion([Message("assistant", answer, channel="final")])

    proofs: dict[str, str] = {}
    context = 60_000
    collector = Collector(ScriptedEngine(script), environment, context)
    judges = Judges(VERIFICATIONS, 1, 1, 0)
    play = SelfPlay(environment, collector, collector, collector, 1, Sampling(20_000), judges, context)
    attempts = play.play(environment.pool.take(6), (0, "selfplay", 1))
    found = {}
    for attempt in attempts:
        record = records[str(attempt.trajectory.problem.metadata["problem"])]
        scores = [one.evaluation.score for one in attempt.analyses if isinstance(one.evaluation, WrittenEvaluation)]
        assert len(scores) == VERIFICATIONS
        assert float(sum(scores)) / VERIFICATIONS == record["average_automatic_rating"]
        assert attempt.proof is not None
        assert attempt.proof.solution == record["proof"].strip()
        found[record["human_rating"], record["average_automatic_rating"]] = attempt.score
    assert found == {(21, 1.0): 1, (0, 0.9296875): Fraction(1, 2), (9, 0.7109375): Fraction(1, 2)}
