"""Cross-entropy against torch's own, weights and gradients included."""

import pytest
import torch
import torch.nn.functional as F

from nmoe.learner.objectives import Outputs, Scored, cross_entropy
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
