"""Losses of labelled examples: cross-entropy against torch's, and classes and steps judged by a head, by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from nmoe.learner.objectives import Outputs, Scored, classification, cross_entropy, step_classification, step_logprobs
from nmoe.model.logprobs import head_logprobs


def test_equals_torch_under_a_token_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = 3 * torch.randn(6, 11, generator=generator), torch.randint(11, (6,), generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, statistics = cross_entropy(
        Outputs(*head_logprobs(ours, torch.eye(11), targets)), Scored(torch.full((6,), 1 / 6))
    )
    reference = F.cross_entropy(theirs, targets)
    assert loss.item() == pytest.approx(reference.item(), abs=1e-6)
    assert statistics == {}
    loss.backward()
    reference.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_weights_by_hand() -> None:
    outputs = Outputs(torch.tensor([-1.0, -2.0, -4.0]), torch.zeros(3))
    loss, _ = cross_entropy(outputs, Scored(torch.tensor([0.5, 0.25, 0.0])))
    assert loss.item() == 1.0


NAN_2 = torch.full((2,), torch.nan)


def test_loss_and_gradient_of_classes_by_hand() -> None:
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


# Logits of (1/4, 3/4), (1/2, 1/2), (4/5, 1/5), and of a token that is not judged.
LOGITS = [[0.0, math.log(3)], [1.0, 1.0], [math.log(4), 0.0], [9.0, -9.0]]
LABELS = torch.tensor([0, 0, 1, -1])
STEPS = torch.tensor([7, 7, 9, -1])


def test_a_step_is_right_with_the_product_of_its_tokens() -> None:
    found_S2 = step_logprobs(torch.tensor(LOGITS[:3]), torch.tensor([0, 0, 1]), 2)
    torch.testing.assert_close(found_S2.exp(), torch.tensor([[5 / 8, 3 / 8], [4 / 5, 1 / 5]]))
    (surest_2,) = step_logprobs(torch.tensor([[-50.0, 50.0]]), torch.tensor([0]), 1)
    assert surest_2[0].exp().item() == pytest.approx(1e-6, rel=0.1)


def test_loss_and_gradient_of_steps_by_hand() -> None:
    logits_N2 = torch.tensor(LOGITS, requires_grad=True)
    logprobs_N = torch.tensor([-2.0, -0.25, -1.0, -3.0], requires_grad=True)
    scored = Scored(
        weights_N=torch.tensor([0.0, 0.5, 0.0, 2.0]),
        labels_N=LABELS,
        label_weights_N=torch.tensor([0.5, 0.5, 3.0, 0.0]),
        steps_N=STEPS,
    )
    loss, statistics = step_classification(Outputs(logprobs_N, torch.zeros(4), logits_N2), scored)
    # The first step counts once, though it has two tokens.
    assert loss.item() == pytest.approx(-0.5 * math.log(5 / 8) - 3 * math.log(1 / 5) + 0.5 * 0.25 + 2 * 3.0, rel=1e-6)
    expected_N = torch.tensor([5 / 8, 5 / 8, 1 / 5, math.exp(-3)])
    torch.testing.assert_close(statistics["label_probability"], expected_N)
    loss.backward()
    torch.testing.assert_close(logprobs_N.grad, torch.tensor([0.0, -0.5, 0.0, -2.0]))
    # Of the wrong step, r = 3/8 right: d(-w log(1 - r)) = w r / (1 - r) d(log r), and d(log r) = (-p(wrong), p(wrong)) per token.
    first = 0.5 * (3 / 8) / (5 / 8)
    expected_N2 = torch.tensor([[-first / 4, first / 4], [-first / 2, first / 2], [3 * 4 / 5, -3 * 4 / 5], [0.0, 0.0]])
    torch.testing.assert_close(logits_N2.grad, expected_N2)


def test_tokens_of_steps_need_a_vocabulary() -> None:
    scored = Scored(weights_N=torch.ones(4), labels_N=LABELS, label_weights_N=torch.ones(4), steps_N=STEPS)
    nan_N = torch.full((4,), torch.nan)
    with pytest.raises(ValueError, match="trains its head alone"):
        step_classification(Outputs(nan_N, nan_N, torch.zeros(4, 2, requires_grad=True)), scored)


def test_a_micro_batch_without_steps_adds_its_tokens_alone() -> None:
    logprobs_N = torch.tensor([-2.0], requires_grad=True)
    scored = Scored(
        weights_N=torch.tensor([0.5]),
        labels_N=torch.tensor([-1]),
        label_weights_N=torch.zeros(1),
        steps_N=torch.tensor([-1]),
    )
    loss, _ = step_classification(Outputs(logprobs_N, torch.zeros(1), torch.zeros(1, 2, requires_grad=True)), scored)
    assert loss.item() == 1.0


def test_micro_batches_add_up_to_the_batch() -> None:
    """Numbers of steps are the batch's, so that a part need not begin at 0."""
    logits_N2 = torch.tensor(LOGITS, requires_grad=True)
    logprobs_N = torch.tensor([-2.0, -0.25, -1.0, -3.0])

    def loss(places: list[int]) -> torch.Tensor:
        outputs = Outputs(logprobs_N[places].requires_grad_(), torch.zeros(len(places)), logits_N2[places])
        scored = Scored(
            weights_N=torch.tensor([0.0, 0.5, 0.0, 2.0])[places],
            labels_N=LABELS[places],
            label_weights_N=torch.tensor([0.5, 0.5, 0.5, 0.0])[places],
            steps_N=STEPS[places],
        )
        return step_classification(outputs, scored)[0]

    whole, parts = loss([0, 1, 2, 3]), loss([0, 1]) + loss([2, 3])
    torch.testing.assert_close(parts, whole)
    (expected,) = torch.autograd.grad(whole, logits_N2)
    (found,) = torch.autograd.grad(parts, logits_N2)
    torch.testing.assert_close(found, expected)
