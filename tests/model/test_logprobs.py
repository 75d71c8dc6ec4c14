"""Token log-probabilities and entropies: values by hand, closed-form gradients, cut-out tokens."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.logprobs import restrict_to_kept, token_logprobs

INF = float("inf")


def test_values_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log() + 7
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 0]))
    assert logprobs.tolist() == pytest.approx([math.log(2 / 8), math.log(1 / 3)], rel=1e-12)
    by_hand = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert entropy.tolist() == pytest.approx([by_hand, math.log(3)], rel=1e-12)


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0]], dtype=torch.float64).log()
    logprobs, entropy = token_logprobs(logits, torch.tensor([2]), temperature=0.5)  # probabilities squared
    assert logprobs.item() == pytest.approx(math.log(25 / 30))
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 30, 4 / 30, 25 / 30)))


def test_large_logits_do_not_overflow() -> None:
    logprobs, entropy = token_logprobs(torch.tensor([[1e4, 1e4 - 1, -1e4]]), torch.tensor([1]))
    assert logprobs.item() == pytest.approx(-1 - math.log1p(math.exp(-1)), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log1p(math.exp(-1)) + math.exp(-1) / (1 + math.exp(-1)), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_by_finite_differences_and_none_for_the_entropy(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3])

    def call(logits: Tensor) -> Tensor:
        return token_logprobs(logits, targets, temperature)[0]

    assert torch.autograd.gradcheck(call, (logits,))
    assert not token_logprobs(logits, targets, temperature)[1].requires_grad


def test_agrees_with_torch_over_a_real_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = 250  # of 5000 logits: more than is taken in one piece
    logits = 4 * torch.randn(rows, 5000, generator=generator)
    targets, upstream = torch.randint(5000, (rows,), generator=generator), torch.randn(rows, generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(ours, targets)
    reference = F.log_softmax(theirs, -1)
    torch.testing.assert_close(logprobs, reference[torch.arange(rows), targets], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1), rtol=1e-5, atol=1e-5)
    logprobs.backward(upstream)
    reference[torch.arange(rows), targets].backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_no_rows_have_no_logprobs() -> None:
    logprobs, entropy = token_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert (logprobs.tolist(), entropy.tolist()) == ([], [])


def test_tokens_cut_out_count_for_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0, 1.0]]).log().index_fill(1, torch.tensor([2]), -INF).requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(2 / 4))
    assert entropy.item() == pytest.approx(1.5 * math.log(2))
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.25, 0.5, 0.0, -0.25])


def test_restriction_keeps_each_row_its_own_set() -> None:
    logits = torch.arange(16, dtype=torch.float32).view(4, 4).requires_grad_()
    kept = torch.tensor([[2, 0, -1], [1, -1, -1], [-1, -1, -1], [3, 2, 1]])
    restricted = restrict_to_kept(logits, kept)
    assert restricted.tolist() == [
        [0.0, -INF, 2.0, -INF],
        [-INF, 5.0, -INF, -INF],
        [8.0, 9.0, 10.0, 11.0],
        [-INF, 13.0, 14.0, 15.0],
    ]
    logprobs, _ = token_logprobs(restricted, torch.tensor([2, 1, 3, 1]))
    assert logprobs[0].item() == pytest.approx(-math.log1p(math.exp(-2)))
    assert logprobs[1].item() == 0.0
    logprobs.sum().backward()
    assert logits.grad is not None
    # What was cut out has no gradient, and each row's adds up to nothing.
    assert (logits.grad[restricted == -INF] == 0).all()
    assert logits.grad.sum(-1).tolist() == pytest.approx([0] * 4, abs=1e-6)
    assert logits.grad[0, 2].item() == pytest.approx(1 - 1 / (1 + math.exp(-2)))
