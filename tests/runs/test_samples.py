"""Samples and the answers of evaluations as lines: what is shown, how much of it, and that a terminal obeys none of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nmoe.cli.command import main
from nmoe.errors import UserError
from nmoe.runs.directory import RunDirectory
from nmoe.runs.ledger import Ledger
from nmoe.runs.report import write_report
from nmoe.runs.samples import answer_lines, bounded, how_ended, latest_samples, sample_lines, shortened, show_answers
from nmoe.text.printable import printable

RECORD: dict[str, Any] = {
    "step": 20,
    "problem": "sort/152",
    "index": 3,
    "history": [],
    "question": "Sort: 3086",
    "gold": "0368",
    "text": "<|channel|>final<|message|>3086<|return|>",
    "failure": "ok",
    "reason": "",
    "reward": 0.1,
    "components": {"format": 1.0, "structure": 1.0, "correctness": 0.0},
    "weights": {"format": 0.1, "structure": 0.0, "correctness": 1.0},
    "answer": "3086",
    "verdict": {"outcome": "incorrect", "score": 0.0, "layer": "exact", "reason": "different text"},
}


def sample(**changes: Any) -> dict[str, Any]:
    return RECORD | changes


def test_a_sample_says_what_was_asked_and_written_and_why_it_has_its_reward() -> None:
    assert list(sample_lines(RECORD)) == [
        "step 20, sample 3 of sort/152: reward 0.1 (format 1 x 0.1, correctness 0 x 1)",
        "  incorrect: different text; answer '3086'; right answer '0368'",
        "  prompt:",
        "    Sort: 3086",
        "  completion:",
        "    <|channel|>final<|message|>3086<|return|>",
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"failure": "truncated", "answer": None, "verdict": None}, "truncated; right answer '0368'"),
        ({"answer": None, "verdict": None}, "no answer found; right answer '0368'"),
        ({"gold": "", "verdict": None, "reason": "style: timed out"}, "answer '3086'; style: timed out"),
        ({"answer": "1\n2\x1b", "gold": "", "verdict": None}, "answer '1\\n2\\x1b'"),
        ({"reason": "two\nlines\x07", "gold": ""}, "incorrect: different text; answer '3086'; two\\nlines\\x07"),
    ],
)
def test_why(changes: dict[str, Any], why: str) -> None:
    assert list(sample_lines(sample(**changes)))[1] == f"  {why}"


def test_messages_before_the_question_belong_to_the_prompt() -> None:
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    lines = list(sample_lines(sample(history=history)))
    assert lines[3:6] == ["    system: Be brief.", "    user: Hi!", "    user: Sort: 3086"]


def test_what_a_terminal_would_obey_is_shown_as_an_escape() -> None:
    written = "a\x1b[2J\x9b1A\x07\r\x08\u202e\u2066\ud800\u2028b\tc 日本\u3000é"
    assert printable(written) == "a\\x1b[2J\\x9b1A\\x07\\r\\x08\\u202e\\u2066\\ud800\\u2028b\tc 日本\u3000é"
    # Persian, a Hindi conjunct, a family, and the mark of a direction: letters of real text.
    for real in ("می\u200cخواهم", "क्\u200dष", "👨\u200d👩\u200d👧", "שלום\u200f!"):
        assert printable(real) == real
    # No line of a completion can pass for one of the run's, which `nmoe runs show` reads from the log.
    forged = sample(text="x\nstep 7: ends here, since it is done\nmini 1/1  loss 0", problem="a\nmini 1/1  ")
    first, *rest = sample_lines(forged)
    assert first.startswith("step 20, sample 3 of a\\nmini 1/1")
    assert all(line.startswith("  ") for line in rest)
    assert "\n" not in "".join([first, *rest])


def test_long_texts_are_cut_in_the_middle_and_say_how_much_is_missing() -> None:
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghij", 6) == "abcd ... 4 characters left out ... ij"
    lines = list(sample_lines(sample(text="\n".join(map(str, range(100)))), 10_000))
    assert lines[5:] == [
        *(f"    {n}" for n in range(8)),
        "    ... 88 lines left out ...",
        *(f"    {n}" for n in range(96, 100)),
    ]
    whole = list(sample_lines(sample(text="\n".join(map(str, range(100))))))
    assert len(whole) == 105
    assert (
        list(sample_lines(sample(text="x" * 5000), 400))[-1]
        == f"    {'x' * 267} ... 4,600 characters left out ... {'x' * 133}"
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six steps, one problem each but for the last two, which share one."""
    with RunDirectory.create(tmp_path / "mine", '[run]\nname = "mine"\n', {"argv": []}, resume=False) as run:
        for step in range(1, 7):
            rewards = (0.0, 1.0, 0.5) if step % 2 else (0.25, 0.25)
            records = [
                sample(step=step, problem=f"p/{min(step, 5)}", index=index, reward=reward, text=f"{step}.{index}```")
                for index, reward in enumerate(rewards)
            ]
            run.ledger.samples(step, records)
            run.ledger.metrics(step, {"reward_mean": 0.5})
    return tmp_path / "mine"


def test_the_last_problems_are_shown_with_their_best_and_worst_samples(run: Path) -> None:
    found = [(one["step"], one["index"], one["reward"]) for one in latest_samples(run, 3)]
    assert found == [(6, 0, 0.25), (4, 0, 0.25), (3, 1, 1.0), (3, 0, 0.0)]


def test_the_report_begins_with_its_result_and_shows_several_problems(run: Path) -> None:
    for step, value in ((0, 0.125), (4, 0.75), (6, 0.5)):
        result = {"mode": "greedy_pass@1", "dataset": "sort", "problems": 200, "value": value}
        Ledger(run).evaluation(step, {"results": [result | {"low": value - 0.1, "high": value + 0.1}]})
    lines = write_report(run).read_text().splitlines()
    assert lines[0] == "# Run mine"
    assert lines[2] == (
        "greedy_pass@1 on sort: 12.5% at step 0 -> 50.0% [40.0%, 60.0%] of 200 at step 6; best 75.0% at step 4"
    )
    shown = lines[lines.index("## Samples") :]
    assert [line.split(":")[0] for line in shown if line.startswith("step ")] == [
        "step 6, sample 0 of p/5",
        "step 4, sample 0 of p/4",
        "step 3, sample 1 of p/3",
        "step 3, sample 0 of p/3",
        "step 2, sample 0 of p/2",
    ]
    assert shown.count("````text") == shown.count("````") == 5, "a fence that the samples' backticks do not close"


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["nmoe", "runs", "samples", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (0 if "--step" not in arguments or "3" in arguments else 2)


# documented: nmoe runs samples runs/speedrun/rl
# documented: nmoe runs samples runs/speedrun/rl --step 1 --characters 0
def test_the_verb(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told(monkeypatch, str(run), "--step", "3", "--characters", "0")
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [
        f"step 3, sample {index} of p/3: reward {reward} (format 1 x 0.1, correctness 0 x 1)"
        for index, reward in enumerate((0, 1, 0.5))
    ]
    told(monkeypatch, str(run), "--problems", "1")
    assert capsys.readouterr().out.startswith("step 6, sample 0 of p/5: reward 0.25")
    told(monkeypatch, str(run), "--step", "7")
    assert capsys.readouterr().err == f"error: --step=7: {run} has no samples of it; those it has are of steps 1 to 6\n"


def test_a_run_without_samples_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDirectory.create(tmp_path / "sft", "[run]\n", {"argv": []}, resume=False).close()
    monkeypatch.setattr(sys, "argv", ["nmoe", "runs", "samples", str(tmp_path / "sft")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


def test_a_broken_line_is_named(run: Path) -> None:
    file = run / "samples" / "step_000006.jsonl"
    file.write_text(json.dumps({"step": 6}) + "\nbroken\n")
    with pytest.raises(UserError, match=r"step_000006\.jsonl:2: not a JSON object"):
        latest_samples(run)


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
