"""Classes told apart by a head, and tokens predicted beside: hand-computed loss and gradient."""

from __future__ import annotations

import math

import pytest
import torch

from nmoe.learner.objectives import Outputs, Scored, classification

NAN_2 = torch.full((2,), torch.nan)


def test_loss_and_gradient_by_hand() -> None:
    logits_NK = torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0]], requires_grad=True)
    scored = Scored(weights_N=torch.tensor([0.5, 2.0]), labels_N=torch.tensor([1, 1]))
    loss, statistics = classification(Outputs(NAN_2, NAN_2, logits_NK), scored)
    # p(label) is 3/4 and 1/5.
    assert loss.item() == pytest.approx(-0.5 * math.log(3 / 4) - 2 * math.log(1 / 5), rel=1e-6)
    torch.testing.assert_close(statistics["label_probability"], torch.tensor([0.75, 0.2]))
    loss.backward()
    # w (p - 1[label])
    expected = torch.tensor([[0.5 * 0.25, 0.5 * -0.25], [2 * 0.8, 2 * -0.8]])
    torch.testing.assert_close(logits_NK.grad, expected)


def test_tokens_beside_classes_by_hand() -> None:
    logits_NK = torch.tensor([[0.0, math.log(3)], [5.0, 7.0]], requires_grad=True)
    logprobs_N = torch.tensor([-9.0, -0.5], requires_grad=True)
    scored = Scored(weights_N=torch.tensor([1.0, 3.0]), labels_N=torch.tensor([0, -1]))
    loss, _ = classification(Outputs(logprobs_N, torch.zeros(2), logits_NK), scored)
    assert loss.item() == pytest.approx(-math.log(1 / 4) + 3 * 0.5, rel=1e-6)
    loss.backward()
    torch.testing.assert_close(logprobs_N.grad, torch.tensor([0.0, -3.0]))
    torch.testing.assert_close(logits_NK.grad, torch.tensor([[-0.75, 0.75], [0.0, 0.0]]))


def test_tokens_need_a_vocabulary() -> None:
    logits_NK = torch.zeros(2, 2, requires_grad=True)
    scored = Scored(weights_N=torch.ones(2), labels_N=torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="trains its head alone"):
        classification(Outputs(NAN_2, NAN_2, logits_NK), scored)
