"""`nmoe grade`: recorded predictions in, verdicts out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import Result

Nmoe = Callable[..., Result]


@pytest.fixture
def predictions(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines of a file."""

    def write(*lines: dict[str, Any] | str) -> Path:
        path = tmp_path / "predictions.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


# documented: nmoe grade FILE.jsonl
def test_verdicts_and_summary(nmoe: Nmoe, predictions: Callable[..., Path]) -> None:
    path = predictions(
        {"gold": "1000", "prediction": " $1,000$ "},
        {"gold": r"\frac{1}{2}", "prediction": "0.5", "id": "algebra/7"},
        "",
        {"gold": "(1, 2)", "prediction": "(2, 1)", "id": 3},
        {"gold": r"(x+1)^2", "prediction": "x^2+2x+1"},
        {"gold": "18", "prediction": ""},
    )
    result = nmoe("grade", path)
    assert result.code == 0
    assert [json.loads(line) for line in result.out.splitlines()] == [
        {"line": 1, "verdict": "correct", "layer": "exact", "reason": "the same text"},
        {"id": "algebra/7", "verdict": "correct", "layer": "numeric", "reason": "the same number"},
        {"id": 3, "verdict": "incorrect", "layer": "structure", "reason": "not the same form or value"},
        {"line": 5, "verdict": "correct", "layer": "symbolic", "reason": "the same value"},
        {"line": 6, "verdict": "incorrect", "layer": "extraction", "reason": "the prediction is empty"},
    ]
    assert re.search(
        r"5 graded in \d+\.\d s: 3 correct \(60\.0%\), 2 incorrect, 0 error; settled by layer: ", result.err
    )
    assert "exact 20.0%" in result.err


HARMONY = (
    "<|channel|>analysis<|message|>4 or 5<|end|><|start|>assistant<|channel|>final<|message|>The sum is 5.<|return|>"
)


@pytest.mark.parametrize(
    ("extract", "prediction", "verdict"),
    [
        ("boxed", r"So \boxed{\frac{10}{2}}, not 6", "correct"),
        ("boxed", "So 5", "incorrect"),
        ("last_number", "first 4, then 5 apples", "correct"),
        ("last_number", "none", "incorrect"),
        ("harmony", HARMONY, "correct"),
        ("harmony", "<|start|>assistant" + HARMONY.removesuffix("<|return|>"), "correct"),
        ("harmony", r"<|channel|>final<|message|>\boxed{5}<|return|>", "correct"),
        ("harmony", "5", "incorrect"),
        ("harmony", "<|channel|>analysis<|message|>5<|return|>", "incorrect"),
        ("harmony", "<|channel|>final<|message|>5<|call|>", "incorrect"),
        ("whole", "The sum is 5.", "incorrect"),
    ],
)
def test_extraction(nmoe: Nmoe, predictions: Callable[..., Path], extract: str, prediction: str, verdict: str) -> None:
    result = nmoe("grade", predictions({"gold": "5", "prediction": prediction}), "--extract", extract)
    assert json.loads(result.out)["verdict"] == verdict


def test_stdin(command: Nmoe) -> None:
    result = command("grade", "-", stdin='{"gold": "5", "prediction": "5.0"}\n')
    assert result.code == 0
    assert json.loads(result.out)["verdict"] == "correct"
    result = command("grade", "-", stdin='\n{"gold": "5"}\n')
    assert result.code == 2
    assert result.out == ""
    assert "stdin:2: no field 'prediction'; a line is" in result.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "predictions.jsonl:2: not JSON"),
        ("[1]", "predictions.jsonl:2: an array, not an object"),
        ('{"prediction": "5"}', "predictions.jsonl:2: no field 'gold'; a line is"),
        ('{"gold": null, "prediction": "5"}', "predictions.jsonl:2: 'gold' is null, not a string"),
        ('{"gold": 5, "prediction": "5"}', "predictions.jsonl:2: 'gold' is 5, not a string"),
        ('{"gold": "5", "prediction": ["5"]}', "predictions.jsonl:2: 'prediction' is [\"5\"], not a string"),
        ('{"gold": "$.$", "prediction": "5"}', "predictions.jsonl:2: nothing is left of the gold answer '$.$'"),
        ('{"gold": "' + "1" * 1001 + '", "prediction": "5"}', "1001 characters, more than 1000"),
    ],
)
def test_bad_lines(nmoe: Nmoe, predictions: Callable[..., Path], line: str, message: str) -> None:
    result = nmoe("grade", predictions({"gold": "1", "prediction": "1"}, line))
    assert result.code == 2
    assert result.out == ""
    assert message in result.err
    assert "Traceback" not in result.err


def test_all_unreadable_golds_are_named_at_once_or_skipped(nmoe: Nmoe, predictions: Callable[..., Path]) -> None:
    path = predictions(
        {"gold": "1", "prediction": "1"},
        {"gold": "$.$", "prediction": "5"},
        {"gold": "6 * 3 = 18\n#### 18", "prediction": "18"},
        {"gold": "2", "prediction": "2"},
        {"gold": r"She sells all of them at the market, so that $x=\boxed{5}$ is left.", "prediction": "5"},
    )
    refused = nmoe("grade", path)
    assert (refused.code, refused.out) == (2, "")
    assert all(f"predictions.jsonl:{line}: " in refused.err for line in (2, 3, 5))
    assert "3 of 5 golds cannot be read" in refused.err
    assert "--skip-unreadable" in refused.err
    graded = nmoe("grade", path, "--skip-unreadable")
    assert graded.code == 0
    assert [json.loads(line)["line"] for line in graded.out.splitlines()] == [1, 4]
    assert "2 graded" in graded.err
    assert "3 skipped, whose gold cannot be read" in graded.err


def test_order_and_units_are_settings(nmoe: Nmoe, predictions: Callable[..., Path]) -> None:
    path = predictions({"gold": "1, 2", "prediction": "2, 1"}, {"gold": "5", "prediction": "5 cm"})

    def verdicts(*options: str) -> list[str]:
        return [json.loads(line)["verdict"] for line in nmoe("grade", path, *options).out.splitlines()]

    assert verdicts() == ["correct", "incorrect"]
    assert verdicts("--answer-order", "as_gold", "--units", "any") == ["incorrect", "correct"]


def test_an_answer_to_a_question_has_to_be_worked_out(nmoe: Nmoe, predictions: Callable[..., Path]) -> None:
    question = {"question": "How many feet are left?", "gold": "24"}
    answers = ["24", "96/4", "24 feet", "24 eggs"]
    path = predictions({"gold": "24", "prediction": "96/4"}, *(question | {"prediction": one} for one in answers))
    verdicts = [json.loads(line)["verdict"] for line in nmoe("grade", path).out.splitlines()]
    assert verdicts == ["correct", "correct", "incorrect", "correct", "incorrect"]
    refused = nmoe("grade", predictions({"gold": "24", "prediction": "24", "question": None}))
    assert (refused.code, refused.out) == (2, "")
    assert "predictions.jsonl:1: 'question' is null, not a string" in refused.err


def test_no_lines_and_no_file(nmoe: Nmoe, predictions: Callable[..., Path]) -> None:
    assert nmoe("grade", predictions("")).code == 2
    missing = nmoe("grade", "missing.jsonl")
    assert missing.code == 2
    assert "missing.jsonl: cannot be read" in missing.err


def test_hostile_predictions(command: Nmoe, predictions: Callable[..., Path]) -> None:
    """All incorrect, soon, and the command ends by itself."""
    hostile = [
        "9**9**9",
        "9^{9^{9^{9}}}",
        "(9^{9^9})!",
        "9" * 400,
        "inf",
        "nan",
        "{" * 100_000,
        "42\0",
        "\ud800",
        "\u202e24",
    ]
    hostile += [
        r"\input{/etc/passwd}",
        "__import__('os').system('false')",
        "(" * 300 + "42" + ")" * 300,
    ]
    hostile += [r"\frac{" * 28 + "1" + "}{2}" * 28, "x" * 1000]
    start = time.monotonic()
    result = command("grade", predictions(*({"gold": r"\sqrt{2}+x", "prediction": text} for text in hostile)))
    assert time.monotonic() - start < 240
    assert result.code == 0
    verdicts = [json.loads(line) for line in result.out.splitlines()]
    assert [verdict["verdict"] for verdict in verdicts] == ["incorrect"] * len(hostile)
    assert any("deadline" in verdict["reason"] for verdict in verdicts)


def test_help_has_an_example(nmoe: Nmoe) -> None:
    assert "nmoe grade predictions.jsonl > verdicts.jsonl" in nmoe("grade", "--help").out
