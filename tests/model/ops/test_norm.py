"""RMSNorm: values by hand, its written-out backward by finite differences and against torch's."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.linear import RMSNorm


def norm(weight: Tensor, eps: float) -> RMSNorm:
    module = RMSNorm(weight.shape[0], eps).to(weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    return module


def test_values_by_hand() -> None:
    module = norm(torch.tensor([1.0, 2.0], dtype=torch.float64), eps=0.0)
    rms = math.sqrt((9 + 16) / 2)
    assert module(torch.tensor([[3.0, 4.0]], dtype=torch.float64)).tolist() == [
        pytest.approx([3 / rms, 2 * 4 / rms], rel=1e-12)
    ]


def test_eps_stands_under_the_root_beside_the_mean_square() -> None:
    module = norm(torch.ones(2, dtype=torch.float64), eps=1e-6)
    x = torch.tensor([[1e-3, 1e-3], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    y = module(x)
    assert y[0].tolist() == pytest.approx([1 / math.sqrt(2)] * 2, rel=1e-12)
    assert y[1].tolist() == [0.0, 0.0]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[1].tolist() == pytest.approx([1e3, 1e3])


@pytest.mark.parametrize("shape", [(5, 6), (3, 2, 6)])
def test_gradients_by_finite_differences(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    module = norm(torch.rand(6, generator=generator, dtype=torch.float64) + 0.5, eps=1e-3)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(call, (x, module.weight))


def test_agrees_with_torch_on_a_view_of_a_wider_tensor() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(16, generator=generator) + 0.5
    wide = torch.randn(7, 5, 16, generator=generator)
    upstream = torch.randn(7, 3, 16, generator=generator)
    results = []
    for own in (True, False):
        x, module = wide.clone().requires_grad_(), norm(weight, 1e-6)
        view = x[:, 1:4]
        y = module(view) if own else F.rms_norm(view, (16,), module.weight, 1e-6)
        y.backward(upstream)
        results.append((y.detach(), x.grad, module.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
