"""A verifier's accuracy has a difference from the start, paired by solution."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nmoe.eval.early_stopping import since_baseline
from nmoe.verifier.judge import Judge
from nmoe.verifier.train import LabelledSolution, evaluate

PROBE = [
    LabelledSolution("a", ("1", "2"), ("+", "-"), first_wrong=1),
    LabelledSolution("b", ("1",), ("+",)),
    LabelledSolution("c", ("1",), ("-",), first_wrong=0),
]


def results(right: list[list[float]]) -> list[dict[str, Any]]:
    said = [torch.tensor([[1 - p, p] for p in one]) for one in right]
    judge = SimpleNamespace(probabilities=lambda asked: said, form=SimpleNamespace(classes=("-", "+")))
    return [dict(one) for one in evaluate(cast(Judge, judge), PROBE, "step", "steps").results]


def test_accuracy_is_paired_by_solution_and_weighted_by_steps(tmp_path: Path) -> None:
    # Right at the start: one step of a. Later: both of a, and b.
    start, later = results([[0.9, 0.9], [0.1], [0.9]]), results([[0.9, 0.1], [0.9], [0.9]])
    (tmp_path / "step_000000.json").write_text(json.dumps({"step": 0, "results": start}))
    found = {one["mode"]: one for one in since_baseline(later, tmp_path)}
    accuracy = found["step_accuracy"]
    assert accuracy["value"] == pytest.approx(3 / 4)
    assert list(accuracy["outcomes"].values()) == [1.0, 1.0, 0.0]
    assert list(accuracy["weights"].values()) == [0.5, 0.25, 0.25]
    assert accuracy["since_start"]["difference"] == pytest.approx(3 / 4 - 1 / 4)
    assert accuracy["since_start"]["low"] < 0.5 < accuracy["since_start"]["high"] <= 1
    assert "since_start" not in found["processbench_f1"]
