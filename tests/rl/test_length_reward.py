"""Rewards for length, by hand."""

import pytest
import torch

from nmoe.rl.group_rewards import length_penalty, overlong_penalty


def test_overlong_penalty_by_hand() -> None:
    tokens = torch.tensor([0, 79, 80, 85, 90, 100, 120])
    expected = [0, 0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(tokens, max_tokens=100, buffer_tokens=20).tolist() == pytest.approx(expected)


def test_length_penalty_by_hand() -> None:
    # Short and right gains, long loses; short and wrong gains nothing.
    tokens, correct = torch.tensor([10, 30, 15, 30, 10]), torch.tensor([1, 1, 1, 0, 0])
    assert length_penalty(tokens, correct).tolist() == pytest.approx([0.5, -0.5, 0.25, -0.5, 0.0])
    assert length_penalty(torch.tensor([5, 5]), torch.tensor([1, 0])).tolist() == [0, 0], "lengths all alike"
    assert length_penalty(torch.tensor([8]), torch.tensor([1])).tolist() == [0], "alone"
