"""Labelled steps: what is read of PRM800K's, Math-Shepherd's and stepwise records, what is dropped, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from stepwise_cases import write_stepwise

from nmoe.data.prm import LabelledSteps, StepDataset, read_source, split_steps
from nmoe.errors import UserError
from nmoe.speedrun import steps as domain

PROBLEM = "What is 3 + 4 + 5?"


def completion(text: str, rating: int | None = 1, flagged: bool = False) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": flagged}


def step(*completions: dict[str, Any], chosen: int | None = 0, human: Any = None) -> dict[str, Any]:
    return {"completions": list(completions), "human_completion": human, "chosen_completion": chosen}


def prm800k(steps: list[Any], reason: str = "solution", **more: Any) -> dict[str, Any]:
    question = {"problem": PROBLEM, "ground_truth_answer": "12", **more.pop("question", {})}
    record = {
        "labeler": "someone",
        "timestamp": "2023-01-22T04:34:27.052924",
        "generation": None,
        "is_quality_control_question": False,
        "is_initial_screening_question": False,
        "question": question,
        "label": {"steps": steps, "total_time": 1000, "finish_reason": reason},
    }
    return record | more


def read(tmp_path: Path, *records: Any, split: str = "train", neutral_is: str | None = "+") -> StepDataset:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return read_source(str(path), split, "", "", neutral_is)


def told(reading: StepDataset) -> list[tuple[tuple[str, ...], tuple[str | None, ...], bool]]:
    return [(one.steps, one.labels, one.finished) for one in reading.solutions]


def test_phase_1_goes_along_what_was_chosen_or_written_by_hand(tmp_path: Path) -> None:
    human = {"text": "7 + 5 = 12", "rating": None, "source": "human", "flagged": False, "corrected_rating": None}
    reading = read(
        tmp_path,
        prm800k(
            [
                step(completion("3 + 4 = 8", -1), completion("3 + 4 = 7"), completion("hm", 0), chosen=1),
                step(completion("7 + 5 = 13", -1), completion("7 + 5 = 2", None), chosen=None, human=human),
            ]
        ),
    )
    assert told(reading) == [
        (("3 + 4 = 7", "7 + 5 = 12"), ("+", "+"), True),
        (("3 + 4 = 8",), ("-",), False),
        (("hm",), ("+",), False),
        (("3 + 4 = 7", "7 + 5 = 13"), ("+", "-"), False),
    ]
    assert [one.alternative for one in reading.solutions] == [False, True, True, True]
    assert [one.score for one in reading.solutions] == [1.0, 0.0, 0.5, 0.0]
    assert reading.dropped == {"completions without a rating": 1}
    assert reading.solutions[0].where == f"{tmp_path / 'records.jsonl'}:1"


def test_a_completion_written_by_hand_may_be_bare_text_or_rated(tmp_path: Path) -> None:
    by_hand = [step(chosen=None, human="a = 1"), step(chosen=None, human={"text": "b = 2", "rating": 0})]
    (one,) = read(tmp_path, prm800k(by_hand), neutral_is=None).solutions
    assert (one.steps, one.labels) == (("a = 1", "b = 2"), ("+", "0"))


@pytest.mark.parametrize("chosen", [None, 0])
def test_phase_2_ends_at_the_first_wrong_step(tmp_path: Path, chosen: int | None) -> None:
    generated = ["3 + 4 = 7", "7 + 5 = 13", "It is 13."]
    record = prm800k(
        [step(completion(generated[0])), step(completion(generated[1], -1), chosen=chosen)],
        "found_error",
        generation=3,
        question={"pre_generated_steps": generated},
    )
    reading = read(tmp_path, record)
    (one,) = reading.solutions
    assert (one.steps, one.labels, one.rest) == (tuple(generated[:2]), ("+", "-"), ("It is 13.",))
    assert (one.first_wrong, one.score, one.alternative) == (1, 0.0, False)
    assert reading.dropped == {"steps after the first wrong one": 1}


def test_what_is_labelled_after_the_first_wrong_step_is_dropped(tmp_path: Path) -> None:
    reading = read(tmp_path, prm800k([step(completion("a", -1)), step(completion("b")), step(completion("c"))]))
    assert told(reading) == [(("a",), ("-",), False)]
    assert reading.dropped == {"steps after the first wrong one": 2}


def test_rows_and_completions_that_are_dropped_are_counted(tmp_path: Path) -> None:
    reading = read(
        tmp_path,
        prm800k([step(completion("a"))], is_quality_control_question=True),
        prm800k([step(completion("a"))], is_initial_screening_question=True),
        prm800k([step(completion("a"))], "bad_problem"),
        prm800k([step(completion("b")), step(completion("c", flagged=True)), step(completion("d"))]),
        prm800k([step(completion("e")), step(completion("  "))]),
        prm800k([step(completion("f")), step(completion("g", None)), step(completion("h"))]),
        prm800k([step(completion("i"))], "give_up"),
        prm800k([{"completions": None, "human_completion": None, "chosen_completion": None}], "give_up"),
    )
    assert told(reading) == [
        (("b",), ("+",), False),
        (("e",), ("+",), False),
        (("f", "g", "h"), ("+", None, "+"), True),
        (("i",), ("+",), False),
    ]
    assert [one.score for one in reading.solutions] == [0.5, 0.5, None, 0.5]
    assert reading.records == 8
    assert reading.dropped == {
        "rows of quality control": 1,
        "rows of screening": 1,
        "bad problems": 1,
        "flagged completions": 1,
        "empty steps": 1,
    }
    assert list(reading.lines())[:2] == [
        "8 records: 4 solutions with steps labelled 5 '+', 1 not labelled",
        "dropped: 1 bad problems",
    ]


@pytest.mark.parametrize("phase", [1, 2])
def test_the_generated_files_come_back_as_the_oracle_says(tmp_path: Path, phase: Any) -> None:
    domain.write_prm800k(tmp_path / f"phase{phase}_train.jsonl", 3, 300, "train", phase)
    for named in (str(tmp_path), str(tmp_path / f"phase{phase}_train.jsonl")):
        reading = read_source(named, "train", "", "", None)
        assert reading.records == 300
        assert reading.dropped["rows of quality control"] > 0
        for one in reading.solutions:
            assert one.first_wrong == domain.first_wrong(one.problem, one.steps)
            assert set(one.labels) <= {"+", "0", "-"}
            if one.finished:
                assert domain.score(one.problem, one.steps) == 1
        assert {label for one in reading.solutions for label in one.labels} == {"+", "0", "-"}
        if phase == 2:
            assert 0.3 < sum(one.score == 0 for one in reading.solutions) / len(reading.solutions) < 0.7
            assert any(one.rest for one in reading.solutions)


def test_both_phases_are_one_split_and_a_slice_counts_their_rows(tmp_path: Path) -> None:
    directory = tmp_path / "prm800k" / "data"
    directory.mkdir(parents=True)
    domain.write_prm800k(directory / "phase1_train.jsonl", 0, 30, "train", 1)
    domain.write_prm800k(directory / "phase2_train.jsonl", 0, 50, "train", 2)
    domain.write_prm800k(directory / "phase2_test.jsonl", 0, 20, "eval", 2)
    assert read_source("prm800k", "train", str(tmp_path), "", "+").records == 80
    assert read_source("prm800k", "train[:40]", str(tmp_path), "", "+").records == 40
    assert read_source("prm800k", "test", str(tmp_path), "", "+").records == 20
    with pytest.raises(
        UserError, match=r"split 'valid': no file of either phase for that split; there are prm800k/data/phase1"
    ):
        read_source("prm800k", "valid", str(tmp_path), "", "+")
    with pytest.raises(UserError, match=r"absent\.jsonl: cannot be read: No such file"):
        read_source("prm800k", "train", str(tmp_path / "absent.jsonl"), "", "+")


def shepherd(*steps: str, labels: str, problem: str = PROBLEM) -> dict[str, str]:
    def text(tags: list[str]) -> str:
        said = [f"Step {place}: {step} {tag}" for place, (step, tag) in enumerate(zip(steps, tags, strict=True), 1)]
        return f"{problem} " + "\n".join(said)

    return {"input": text(["ки"] * len(steps)), "label": text(list(labels)), "task": "GSM8K"}


def test_math_shepherd(tmp_path: Path) -> None:
    reading = read(
        tmp_path,
        shepherd("3 + 4 = 7.", "7 + 5 = 12. The answer is: 12", labels="++"),
        shepherd("3 + 4 = 7.", "7 - 5 = 2.", "So it is 2. The answer is: 2", labels="+--"),
        shepherd("3+4=7", "", "7+5=12", labels="+++"),
    )
    assert told(reading) == [
        (("3 + 4 = 7.", "7 + 5 = 12. The answer is: 12"), ("+", "+"), True),
        (("3 + 4 = 7.", "7 - 5 = 2."), ("+", "-"), False),
        (("3+4=7",), ("+",), False),
    ]
    assert {one.problem for one in reading.solutions} == {PROBLEM}
    assert reading.solutions[1].rest == ("So it is 2. The answer is: 2",)
    assert reading.dropped == {"steps after the first wrong one": 1, "empty steps, and the steps after them": 2}


def test_of_both_sources_the_labels_that_agree_are_kept(tmp_path: Path) -> None:
    people, estimates = tmp_path / "people.jsonl", tmp_path / "estimates.jsonl"
    people.write_text(
        json.dumps(prm800k([step(completion("3 + 4 = 7")), step(completion("7 + 5 = 12", 0))]))
        + "\n"
        + json.dumps(prm800k([step(completion("3 + 4 = 8", -1))], "found_error"))
    )
    estimates.write_text(
        json.dumps(shepherd("3 +  4 = 7", "7 + 5 = 12", labels="++"), ensure_ascii=False)
        + "\n"
        + json.dumps(shepherd("3 + 4 = 8", labels="+"), ensure_ascii=False)
    )

    def both(neutral_is: str | None) -> list[tuple[str | None, ...]]:
        reading = read_source("both", "train", str(people), str(estimates), neutral_is)
        contradicting = reading.dropped["labels that contradict another label of the same steps"]
        assert contradicting == (2 if neutral_is == "+" else 4)
        assert reading.dropped["solutions without a label left"] == 2
        return [one.labels for one in reading.solutions]

    assert both("+") == [("+", "+"), ("+", "+")]
    assert both(None) == [("+", None), ("+", None)]  # neutral is a label of its own, and not the one of the estimate


def test_stepwise_records(tmp_path: Path) -> None:
    write_stepwise(tmp_path / "stepwise.jsonl", 0, 100, "train")
    reading = read_source(str(tmp_path / "stepwise.jsonl"), "train", "", "", "+")
    expected = [(one.question, one.first_wrong) for one in domain.solutions(0, 100, "train")]
    assert [(one.problem, one.first_wrong) for one in reading.solutions] == expected
    record = {"prompt": PROBLEM, "completions": ["a", "b", "c"], "labels": [True, False, True]}
    (one,) = (reading := read(tmp_path, record)).solutions
    assert one == LabelledSteps(PROBLEM, ("a", "b"), ("+", "-"), False, one.where, rest=("c",))
    assert reading.dropped == Counter({"steps after the first wrong one": 1})


MULTILINE = {"prompt": PROBLEM, "completions": ["a\nb", "c\n\n# d\n\n e "], "labels": [True, True]}
SHEPHERD = "3 + 4? Step 1: a\nb ки\nStep 2: c\n\n# d\n\n e ки"


@pytest.mark.parametrize(
    "record",
    [
        MULTILINE,
        {"input": SHEPHERD, "label": SHEPHERD.replace("ки", "+"), "task": "GSM8K"},
        prm800k([step(completion("a\nb", 1)), step(completion("c\n\n# d\n\n e ", 1))]),
    ],
)
def test_each_line_of_a_step_is_a_step_as_it_is_of_an_answer(tmp_path: Path, record: dict[str, Any]) -> None:
    (one,) = read(tmp_path, record).solutions
    assert one.steps == ("a", "b", "c", "# d", "e")
    assert one.labels == ("+",) * 5
    assert list(one.steps) == split_steps("\n".join(one.steps)) == split_steps("a\nb\nc\n\n# d\n\n e ")


def test_a_wrong_step_is_wrong_at_its_last_line_and_its_other_lines_have_no_label(tmp_path: Path) -> None:
    (one,) = read(tmp_path, MULTILINE | {"labels": [True, False]}).solutions
    assert (one.labels, one.first_wrong, one.score) == (("+", "+", None, None, "-"), 4, 0)
    (one,) = read(tmp_path, MULTILINE | {"labels": ["neutral", "correct"]}, neutral_is=None).solutions
    assert (one.labels, one.score) == (("0", "0", "+", "+", "+"), 1)
    (one,) = read(tmp_path, MULTILINE | {"labels": [False, True]}).solutions
    assert (one.steps, one.labels, one.rest) == (("a", "b"), (None, "-"), ("c", "# d", "e"))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (prm800k([step(completion("b", 2))]), r":2: .*completions\[0\]\.rating is 2, not -1, 0, 1 or null"),
        (prm800k([step(completion("b", True))]), r":2: .*rating is True"),
        (prm800k([step(completion("b"), chosen=4)]), r":2: .*chosen_completion is 4, and there are 1 completions"),
        (prm800k([step(completion("b"))], "bored"), r":2: .*finish_reason is 'bored'"),
        (prm800k([step({"rating": 1})]), r":2: .*completions\[0\] has no text"),
        (prm800k([7]), r":2: .*label\.steps\[0\] is int, not an object"),
        ({"prompt": "p", "completions": ["a"], "labels": [True]}, r":2: not a record of PRM800K: question is NoneType"),
        ([1], r":2: an array, not an object"),
    ],
)
def test_a_record_of_another_form_is_refused_with_its_line(tmp_path: Path, second: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, prm800k([step(completion("a"))]), second)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (shepherd("a", "b", labels="+?"), r":1: .*not `input` with \+ or - in place of"),
        ({"input": "p Step 1: a ки", "label": "p Step 1: b +"}, r":1: .*not `input` with"),
        ({"input": "p Step 1: a ки and more", "label": "p Step 1: a + and more"}, r":1: .*text behind the last tag"),
        ({"input": "just a ки", "label": "just a +"}, r":1: .*no problem before 'Step 1:'"),
        ({"question": "q", "answer": "a"}, r":1: has no format of labelled steps: PRM800K .*'question', 'answer'"),
        ({"prompt": "p", "completions": ["a"], "labels": ["maybe"]}, r":1: labels\[0\] is 'maybe'"),
    ],
)
def test_a_first_record_that_is_malformed_is_refused(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, record)


def test_torn_and_empty_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_text(json.dumps(prm800k([step(completion("a"))])) + '\n{"question": {"prob')
    with pytest.raises(UserError, match=r"torn\.jsonl:2: not JSON"):
        read_source(str(path), "train", "", "", "+")
    path.write_text("")
    with pytest.raises(UserError, match="no records"):
        read_source(str(path), "train", "", "", "+")
    path.write_text(json.dumps(prm800k([step(completion("a"))], is_quality_control_question=True)))
    with pytest.raises(UserError, match=r"no labelled step is left to train on \(dropped: 1 rows of quality control\)"):
        read_source(str(path), "train", "", "", "+")
