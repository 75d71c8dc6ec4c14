"""Rewards for length, by hand."""

import pytest
import torch

from nmoe.learner.advantages import length_penalty, overlong_penalty


def test_overlong_penalty_by_hand() -> None:
    tokens = torch.tensor([0, 79, 80, 85, 90, 100, 120])
    expected = [0, 0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(tokens, max_tokens=100, buffer_tokens=20).tolist() == pytest.approx(expected)


def test_length_penalty_by_hand() -> None:
    # Group 4: 10 to 30 tokens. Group 2: all alike. Group 9: alone.
    tokens = torch.tensor([10, 5, 30, 15, 5, 30, 10, 8])
    groups = torch.tensor([4, 2, 4, 4, 2, 4, 4, 9])
    correct = torch.tensor([1, 1, 1, 1, 0, 0, 0, 1])
    # Short and right gains, long loses; short and wrong gains nothing.
    expected = [0.5, 0.0, -0.5, 0.25, 0.0, -0.5, 0.0, 0.0]
    assert length_penalty(tokens, correct, groups).tolist() == pytest.approx(expected)
    assert length_penalty(tokens[:0], correct[:0], groups[:0]).tolist() == []
