"""Which differences between two runs' metrics scripts/same_numbers.py tells of."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import same_numbers
from same_numbers import differences


def test_only_timings_may_differ() -> None:
    before = [{"step": 1, "loss": 0.5, "time_step_s": 1.0, "tokens_per_second": 9.0}]
    assert list(differences(before, [before[0] | {"time_step_s": 2.0, "tokens_per_second": 8.0}])) == []
    assert list(differences(before, [before[0] | {"loss": 0.5 + 1e-12}])) == [
        "loss: 0.5 before, 0.500000000001 after, at step 1"
    ]


def test_every_key_is_told_once_with_its_first_step() -> None:
    before = [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": 1, "b": 1}, {"step": 3, "a": 1, "b": 1}]
    after = [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": 2, "c": 1}]
    assert list(differences(before, after)) == [
        "3 steps before, 2 after",
        "a: 1 before, 2 after, at step 2",
        "b: 1 before, absent after, at step 2",
        "c: absent before, 1 after, at step 2",
    ]


def test_a_renamed_metric_is_compared_under_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_numbers, "RENAMED", {"old": "new"})
    assert list(differences([{"step": 1, "old": 3}], [{"step": 1, "new": 3}])) == []
    assert list(differences([{"step": 1, "old": 3}], [{"step": 1, "new": 4}])) == ["new: 3 before, 4 after, at step 1"]
