"""Multiple choice, scores of proofs and of evaluations, labels and scores of steps: from records to verdicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.envs.pools import Pool
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.errors import UserError
from nmoe.types import Problem, Verdict

Pose = Callable[..., Problem]
CITIES = ["London", "Paris", "A small town", "B"]


@pytest.fixture
def pose(tmp_path: Path, make_pool: Callable[..., Pool]) -> Pose:
    """The problem that a JSON record is."""

    def pose(task_type: str, **record: Any) -> Problem:
        path = tmp_path / "records.jsonl"
        path.write_text(json.dumps({"problem": "Which?", **record}) + "\n")
        return make_pool({"type": "jsonl", "path": str(path), "task_type": task_type}).take(1)[0]

    return pose


def verify(problem: Problem, answer: str) -> Verdict:
    return asyncio.run(TASKS[problem.task_type].verify(problem, Attempt(answer)))


@pytest.mark.parametrize(
    ("options", "gold", "letter"),
    [
        (CITIES, "B", "B"),
        (CITIES, "(b)", "B"),
        (CITIES, 1, "B"),
        (CITIES, 0, "A"),
        (CITIES, "Paris", "B"),
        (CITIES, "a small town.", "C"),
        ({"A": "London", "B": "Paris"}, "B", "B"),
        ({"1": "London", "2": "Paris"}, "2", "B"),
        ({"label": ["1", "2"], "text": ["London", "Paris"]}, "1", "A"),
        ({"A": "London", "B": "Paris", "C": None}, "A", "A"),
    ],
)
def test_options_and_golds(pose: Pose, options: Any, gold: Any, letter: str) -> None:
    problem = pose("multiple_choice", choices=options, answer=gold, subject="geography")
    assert problem.gold == letter
    assert problem.question.startswith("Which?\n\nA. London\nB. Paris")
    assert problem.metadata["subject"] == "geography"
    assert problem.groups == ["subject=geography"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "B"}, r"records\.jsonl:1: no options"),
        ({"choices": ["one"], "answer": "A"}, "1 options"),
        ({"choices": ["one", 2], "answer": "A"}, "every option is a text"),
        ({"choices": ["one", "two"], "answer": "C"}, "'C' is neither a letter"),
        ({"choices": ["one", "two"], "answer": 2}, "'2' is neither a letter"),
        ({"choices": ["one", "one"], "answer": "one"}, "'one' is neither a letter"),
        ({"choices": {"label": ["A"], "text": ["one", "two"]}, "answer": "A"}, "2 options with 1 labels"),
        ({"choices": ["one", "two"], "answer": True}, "holds the boolean True, not text"),
    ],
)
def test_records_that_are_no_choice(pose: Pose, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pose("multiple_choice", **record)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("B", True),
        ("b", True),
        (" (B). ", True),
        ("[B]", True),
        ("B)", True),
        ("**B**", True),
        (r"$\text{B}$", True),
        ("Option B", True),
        ("Answer: B", True),
        ("The answer is (B).", True),
        ("So, the correct answer is option B", True),
        (r"I think it is \boxed{B}", True),
        ("B. Paris", True),
        ("(B) paris", True),
        ("Paris", True),
        ("The answer is Paris.", True),
        ("A", False),
        ("E", False),
        ("A. Paris", False),
        ("B. London", False),
        ("A or B", False),
        ("AB", False),
        ("B, A", False),
        ("London, Paris", False),
        ("Be careful", False),
        ("A small town", False),
        ("B is not right", False),
        ("", False),
        ("Β", False),  # Greek
        ("B" * 2000, False),
    ],
)
def test_answers_of_a_choice(pose: Pose, answer: str, right: bool) -> None:
    problem = pose("multiple_choice", choices=CITIES[:3], answer="B")
    verdict = verify(problem, answer)
    assert (verdict.outcome == "correct") is right
    assert verdict.layer == "choice"
    assert verify(pose("multiple_choice", choices=CITIES[:3], answer="C"), "A small town").score == 1


@given(st.text(max_size=40))
def test_a_choice_is_total(answer: str) -> None:
    problem = Problem("demo/0", "multiple_choice", "?", "B", "demo", {"options": json.dumps(CITIES)})
    assert verify(problem, answer).outcome in ("correct", "incorrect")


PARTS = {
    "proof_verification": {"proof": "By induction."},
    "meta_verification": {"solution": "By induction.", "evaluation": "The base case is missing: 0.5"},
    "prm_solution": {"steps": ["x = 1", "so x + 1 = 2"]},
}


@pytest.mark.parametrize("task_type", PARTS)
def test_scores(pose: Pose, task_type: str) -> None:
    half = pose(task_type, answer=0.5, **PARTS[task_type])
    for part in ("Which?", "By induction." if task_type != "prm_solution" else "2. so x + 1 = 2"):
        assert part in half.question
    assert verify(half, "0.5") == Verdict("correct", 1.0, "score", "0.5 for 0.5")
    assert verify(half, r"\frac{1}{2}").score == 1
    assert verify(half, "1") == Verdict("incorrect", 0.5, "score", "1 for 0.5")
    assert verify(half, "0").score == 0.5
    zero = pose(task_type, answer="0", **PARTS[task_type])
    assert [verify(zero, answer).score for answer in ("0", "0.5", "1")] == [1.0, 0.5, 0.0]
    for bad in ("2", "0.7", "good", "-1", "", "0.5 or 1", "1" * 5000):
        assert verify(half, bad) == Verdict("incorrect", 0.0, "score", "no score of 0, 0.5 or 1")
    with pytest.raises(UserError, match=r"is 0, 0\.5 or 1, not '0\.3'"):
        pose(task_type, answer=0.3, **PARTS[task_type])


@pytest.mark.parametrize("word", ["overall", "overal"])
@pytest.mark.parametrize("score", [r"\boxed{0.5}", "0.5", "$0.5$", r"\n\n\boxed{\frac{1}{2}}".replace(r"\n", "\n")])
def test_a_score_after_its_evaluation(pose: Pose, word: str, score: str) -> None:
    problem = pose("proof_verification", answer=0.5, **PARTS["proof_verification"])
    said = f"Here is my evaluation of the solution: yes.\n\nBased on my evaluation, the final {word} score should be: {score}"
    assert verify(problem, said).score == 1
    assert verify(problem, said.removesuffix(score)).score == 0


@pytest.mark.parametrize("task_type", ["proof_verification", "meta_verification", "prm_step", "prm_solution"])
def test_records_without_what_is_judged(pose: Pose, task_type: str) -> None:
    with pytest.raises(UserError, match=r"records\.jsonl:1: (none of the fields|field 'steps')"):
        pose(task_type, answer="1")


@pytest.mark.parametrize(
    ("gold", "label"),
    [(1, "+"), (0, "0"), (-1, "-"), ("+", "+"), ("-", "-"), (True, "+"), (False, "-"), ("neutral", "0")],
)
def test_labels_of_steps(pose: Pose, gold: Any, label: str) -> None:
    problem = pose("prm_step", answer=gold, steps=["x = 1", "so x + 1 = 3"])
    assert problem.gold == label
    assert problem.metadata["step"] == 2
    assert "1. x = 1\n2. so x + 1 = 3" in problem.question
    assert {answer for answer in "+0-" if verify(problem, answer).outcome == "correct"} == {label}
    for bad in ("", "+-", "the step is correct", "2", "− −"):
        assert verify(problem, bad).outcome == "incorrect"


def test_labels_have_other_spellings(pose: Pose) -> None:
    problem = pose("prm_step", answer=-1, steps=["x = 1"])
    for answer in ("-", "-1", "−1", "Incorrect", " negative. ", "false"):
        assert verify(problem, answer).outcome == "correct", answer
    with pytest.raises(UserError, match="the gold label of a step is one of"):
        pose("prm_step", answer="perhaps", steps=["x = 1"])


@pytest.mark.parametrize("task_type", ["multiple_choice", *PARTS, "prm_step"])
def test_example_answers_are_one_right_and_one_wrong(pose: Pose, task_type: str) -> None:
    record = {"choices": CITIES, "answer": "A"} if task_type == "multiple_choice" else {"answer": 1, "steps": ["x = 1"]}
    problem = pose(task_type, **(record | PARTS.get(task_type, {})))
    right, wrong = TASKS[task_type].example_answers(problem)
    assert verify(problem, right).outcome == "correct"
    assert verify(problem, wrong).outcome == "incorrect"


def test_math_keeps_level_and_subject(pose: Pose, tmp_path: Path, make_pool: Callable[..., Pool]) -> None:
    assert pose("math", answer="5", level="Level 5", type="Algebra").groups == ["level=Level 5", "subject=Algebra"]
    assert pose("math", answer="5", level=3, subject="Geometry").groups == ["level=3", "subject=Geometry"]
    assert pose("math", answer="5", level=None).groups == []
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "math.parquet"
    parquet.write_table(pyarrow.table({"problem": ["1+1?"], "answer": ["2"], "level": ["Level 1"], "other": [1]}), path)
    pool = make_pool({"type": "parquet", "path": str(path), "task_type": "math"})
    assert pool.take(1)[0].metadata == {"record": 0, "level": "Level 1"}


def test_commits_of_a_record_are_kept(pose: Pose) -> None:
    assert pose("gsm8k", answer="5", base_commit="abc").metadata == {"record": 0, "base_commit": "abc"}
