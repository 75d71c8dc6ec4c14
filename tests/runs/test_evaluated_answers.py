"""The answers that an evaluation keeps: counted, bounded, and shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nmoe.cli.command import main
from nmoe.errors import UserError
from nmoe.runs.answers import answer_lines, bounded, how_ended, show_answers
from nmoe.runs.directory import RunDirectory

RESULT: dict[str, Any] = {"mode": "greedy_pass@1", "dataset": "larger", "problems": 50, "value": 0.02}


def answered(number: int, *answers: tuple[str | None, bool, str]) -> dict[str, Any]:
    texts, correct, failures = zip(*answers, strict=True)
    named = {"id": f"larger/{number}", "question": f"Which is larger, {number} or 7?", "gold": str(max(number, 7))}
    return {**named, "answers": list(texts), "correct": list(correct), "failures": list(failures)}


ANSWERS = [
    answered(1, ("7", True, "ok")),
    answered(2, ("To determine\x1b[2J\nwhich", False, "truncated")),
    answered(9, ("7", False, "ok"), (None, False, "parse_error")),
]


@pytest.mark.parametrize(
    ("failures", "limit", "said"),
    [
        ({"ok": 6, "truncated": 44}, 12, "44 of 50 were cut at 12 new tokens"),
        ({"ok": 49, "truncated": 1}, 1200, "1 of 50 was cut at 1,200 new tokens"),
        (
            {"ok": 40, "truncated": 7, "parse_error": 3},
            None,
            "7 of 50 were cut at the end of the context, 3 parse_error",
        ),
        ({"ok": 48, "timeout": 2}, 12, "2 timeout"),
        ({"ok": 50}, 12, ""),
        (None, 12, ""),
    ],
)
def test_how_completions_ended(failures: dict[str, int] | None, limit: int | None, said: str) -> None:
    assert (
        how_ended({**RESULT, "sampling": {"max_tokens": limit}} | ({"failures": failures} if failures else {})) == said
    )


def test_answers_are_shown_wrong_ones_first_and_none_of_them_is_a_line_of_its_own() -> None:
    result = {**RESULT, "answers": ANSWERS, "failures": {"ok": 2, "truncated": 2}, "sampling": {"max_tokens": 12}}
    assert list(answer_lines(10, result, 2)) == [
        "step 10, greedy_pass@1 on larger 2.0% of 50: 2 of 4 were cut at 12 new tokens",
        "  larger/2: Which is larger, 2 or 7?",
        "    right answer '7'",
        r"    truncated: 'To determine\x1b[2J\nwhich'",
        "  larger/9: Which is larger, 9 or 7?",
        "    right answer '9'",
        "    wrong: '7'",
        "    parse_error: no answer",
    ]
    assert list(answer_lines(10, result, 9))[-3:] == [
        "  larger/1: Which is larger, 1 or 7?",
        "    right answer '7'",
        "    right: '7'",
    ]


def test_a_long_answer_is_kept_by_its_ends() -> None:
    kept = bounded(answered(1, ("a" * 5000 + "b" * 5000, False, "truncated")))
    (answer,) = kept["answers"]
    assert len(answer) < 350
    assert answer.startswith("a" * 200)
    assert answer.endswith("b" * 100)
    assert (kept["correct"], kept["id"]) == ([False], "larger/1")


# documented: nmoe runs samples runs/speedrun/rl --eval
def test_the_verb_shows_the_answers_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory.create(tmp_path / "rl", "[run]\nsteps = 1\n", {"argv": []}, resume=False) as run:
        run.ledger.evaluation(1, {"results": [RESULT | {"answers": ANSWERS, "low": 0.0, "high": 0.1}]})
    monkeypatch.setattr(sys, "argv", ["nmoe", "runs", "samples", str(tmp_path / "rl"), "--eval", "--problems", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == list(answer_lines(1, RESULT | {"answers": ANSWERS}, 1))


def test_a_step_without_answers_is_named(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for step, more in ((0, {"answers": ANSWERS[:1]}), (10, {"answers": ANSWERS[1:]}), (20, {})):
        record = {"step": step, "results": [RESULT | more]}
        (tmp_path / "eval" / f"step_{step:06d}.json").write_text(json.dumps(record))
    assert next(show_answers(tmp_path, None, 1)).startswith("step 10, ")
    assert list(show_answers(tmp_path, 0, 4))[1] == "  larger/1: Which is larger, 1 or 7?"
    with pytest.raises(UserError, match=r"--step=20: .* of steps 0, 10"):
        list(show_answers(tmp_path, 20, 1))
    with pytest.raises(UserError, match="no evaluation there keeps answers"):
        list(show_answers(tmp_path / "eval", None, 1))
