"""The step-by-step domain: what the oracle calls wrong, what is planted, what splits share, and the files written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwise_cases import write_stepwise

from nmoe.envs.tasks import TASKS
from nmoe.speedrun import steps

QUESTION = "Sum: 4+7+2+5"


@pytest.mark.parametrize(
    ("written", "wrong", "score"),
    [
        (["4+7=11", "11+2=13", "13+5=18"], None, 1.0),
        (["4+7=11", "11 so far", "11+2=13", "13+5=18"], None, 1.0),
        (["4+7=11", "11+2=13"], None, 0.5),
        (["4+7=11", "11 so far"], None, 0.5),
        ([], None, 0.0),
        (["4+7=1", "1+2=3", "3+5=8"], 0, 0.0),  # the ten forgotten
        (["4+7=11", "12+2=14", "14+5=19"], 1, 0.0),  # another total
        (["4+7=11", "11+3=14", "14+5=19"], 1, 0.0),  # another number
        (["4+7=11", "11+5=16"], 1, 0.0),  # a number left out
        (["4+7=11", "12 so far", "11+2=13", "13+5=18"], 1, 0.0),
        (["4+7=11", "11+2=13", "13+5=18", "18+5=23"], 3, 0.0),  # one number twice
        (["7+4=11", "11+2=13", "13+5=18"], 0, 0.0),
        (["4+7=11", "hence 13", "13+5=18"], 1, 0.0),
        (["4+7=" + "1" * 5000], 0, 0.0),
    ],
)
def test_the_oracle(written: list[str], wrong: int | None, score: float) -> None:
    assert steps.first_wrong(QUESTION, written) == wrong
    assert steps.score(QUESTION, written) == score


@given(st.lists(st.text(max_size=12), max_size=6))
def test_the_oracle_is_total(written: list[str]) -> None:
    wrong = steps.first_wrong(QUESTION, written)
    assert wrong is None or 0 <= wrong < len(written)
    assert steps.score(QUESTION, written) in (0.0, 0.5, 1.0)


def test_a_solved_problem_is_right_and_a_ten_forgotten_is_wrong() -> None:
    assert steps.solve(QUESTION) == ["4+7=11", "11+2=13", "13+5=18"]
    found = [one for one in steps.solutions(0, 3000, "train") if one.first_wrong is not None]
    for one in found:
        assert one.first_wrong is not None
        assert list(one.steps[: one.first_wrong]) == steps.solve(one.question)[: one.first_wrong]
        assert one.ratings == (1,) * one.first_wrong + (-1,)
    assert any(one.steps[one.first_wrong or 0].endswith(("8+5=3", "9+5=4")) for one in found)


def test_shares_and_places_are_as_they_are_set() -> None:
    made = list(steps.solutions(1, 4000, "train", restated=0.2))
    kinds = Counter(one.score for one in made)
    assert kinds[0.0] / len(made) == pytest.approx(steps.WRONG, abs=0.04)
    assert kinds[0.5] / len(made) == pytest.approx(steps.UNFINISHED, abs=0.03)
    places = Counter(one.first_wrong for one in made)
    assert min(places[place] for place in range(steps.SHORTEST)) > 200
    assert {rating for one in made for rating in one.ratings} == {-1, 0, 1}


def test_splits_share_no_problem_in_whatever_order() -> None:
    key = TASKS["sum"].split_key

    def problems(split: steps.Split, seed: int) -> set[str]:
        return {key(one.question) for one in steps.solutions(seed, 2000, split)}

    assert not (problems("train", 0) | problems("train", 1)) & (problems("eval", 0) | problems("eval", 1))
    assert key("Sum: 7+4+9+2") == key("Sum: 9+2+4+7")


def test_a_seed_makes_its_own_solutions() -> None:
    def drawn(seed: int) -> list[steps.Solution]:
        return list(steps.solutions(seed, 20, "train"))

    assert drawn(0) == drawn(0) != drawn(1)


def test_prm800k_phase_2_ends_at_the_first_wrong_step(tmp_path: Path) -> None:
    path = tmp_path / "phase2_train.jsonl"
    steps.write_prm800k(path, 0, 400, "train", phase=2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 400
    reasons = Counter(record["label"]["finish_reason"] for record in records)
    assert min(reasons["found_error"], reasons["solution"]) > 150
    for record in records:
        labelled = record["label"]["steps"]
        texts = [step["completions"][0]["text"] for step in labelled]
        assert texts == record["question"]["pre_generated_steps"][: len(texts)]
        ratings = [step["completions"][0]["rating"] for step in labelled]
        wrong = steps.first_wrong(record["question"]["problem"], texts)
        assert ratings.count(-1) == (wrong is not None)
        for step, rating in zip(labelled, ratings, strict=True):
            assert step["chosen_completion"] == (None if rating == -1 else 0)
    assert any(record["is_quality_control_question"] for record in records)
    assert any(record["is_initial_screening_question"] for record in records)


def test_prm800k_phase_1_goes_on_from_the_chosen_completion(tmp_path: Path) -> None:
    path = tmp_path / "phase1_train.jsonl"
    steps.write_prm800k(path, 0, 400, "train", phase=1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    written_by_hand = 0
    for record in records:
        assert record["generation"] is None
        assert "pre_generated_steps" not in record["question"]
        told = []
        for step in record["label"]["steps"]:
            chosen = step["chosen_completion"]
            told.append((step["human_completion"] if chosen is None else step["completions"][chosen])["text"])
            written_by_hand += chosen is None
            for completion in step["completions"]:
                wrong = steps.first_wrong(record["question"]["problem"], [*told[:-1], completion["text"]])
                assert (completion["rating"] == -1) == (wrong is not None)
        assert steps.first_wrong(record["question"]["problem"], told) is None
    assert written_by_hand > 10


def test_self_play_inputs_are_different_problems(tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    steps.write_problems(path, 0, 300, "train")
    records = json.loads(path.read_text())
    assert len({record["question"] for record in records}) == len({record["id"] for record in records}) == 300
    assert records[0].keys() == {"id", "question", "answer", "contest", "problem_idx"}
    for record in records:
        assert steps.score(record["question"], steps.solve(record["question"])) == 1
        assert record["answer"] == steps.solve(record["question"])[-1].partition("=")[2]


def test_stepwise_records_stop_at_the_first_wrong_step(tmp_path: Path) -> None:
    path = tmp_path / "stepwise.jsonl"
    write_stepwise(path, 0, 200, "eval")
    for line in path.read_text().splitlines():
        record = json.loads(line)
        wrong = steps.first_wrong(record["prompt"], record["completions"])
        assert record["labels"] == [index != wrong for index in range(len(record["completions"]))]


def test_a_misconception_is_systematic(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    steps.write_solutions(path, 0, 2000, "train", misconceived=0.6)
    right = 0
    for line in path.read_text().splitlines():
        question, *said = json.loads(line)["text"].split("\n")
        correct = said == steps.solve(question)
        assert correct or said == steps._without_tens(question)
        right += correct
    # A few sums have no ten to forget.
    assert right / 2000 == pytest.approx(0.4 + 0.6 * 0.02, abs=0.05)
    assert steps._without_tens("Sum: 8+5+9+4") == ["8+5=3", "3+9=2", "2+4=6"]
    assert steps._without_tens("Sum: 8+1+1+4") == ["8+1=9", "9+1=0", "0+4=4"]
