"""Pointwise kernels and RMSNorm: references by hand and by finite differences, Triton's interpreter against the references."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.layers import RMSNorm
from nmoe.model.ops.torch import TorchOps
from nmoe.model.ops.triton.ops import TritonOps


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


OPS = TorchOps()

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


def relative_error(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None
    assert theirs is not None
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


@pytest.fixture
def triton_is_there() -> None:
    pytest.importorskip("triton", reason="the kernels' interpreter comes with triton")


def test_swiglu_by_hand() -> None:
    gate_up = torch.tensor([[0.0, 2.0, 3.0, 5.0]])
    assert OPS.swiglu(gate_up)[0].tolist() == pytest.approx([0, 5 * 2 / (1 + 2.718281828**-2)], rel=1e-6)
    clamped = OPS.swiglu(gate_up, 1.5)[0].tolist()  # gate 1.5, up 1.5
    assert clamped == pytest.approx([0, 1.5 / (1 + 2.718281828 ** (-1.702 * 1.5)) * 2.5], rel=1e-6)


@pytest.mark.usefixtures("triton_is_there")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("width", [12, 32, 1100])
def test_swiglu_kernels_equal_the_reference(width: int, limit: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (2 * torch.randn(5, 2 * width, generator=generator)).to(dtype)
    upstream = torch.randn(5, width, generator=generator).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.to(torch.float64, copy=True).requires_grad_()
    out, expected = TritonOps().swiglu(ours, limit), OPS.swiglu(theirs, limit)
    out.backward(upstream)
    expected.backward(upstream.double())
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(ours.grad, theirs.grad) < TOLERANCE[dtype]


# Tokens 0, 1, 2 choose rows (3, 0), (1, 4), (2, 5).
ROW_TK = torch.tensor([[3, 0], [1, 4], [2, 5]])
TOKEN_R = torch.tensor([0, 1, 2, 0, 1, 2])


def test_rows_go_out_and_come_back() -> None:
    x = torch.tensor([[1.0], [10.0], [100.0]], requires_grad=True)
    y = OPS.dispatch(x, TOKEN_R, ROW_TK)
    assert y.flatten().tolist() == [1, 10, 100, 1, 10, 100]
    y.backward(torch.arange(1.0, 7.0).unsqueeze(-1))
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [4 + 1, 2 + 5, 3 + 6]
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    rows = torch.arange(1.0, 7.0).unsqueeze(-1).requires_grad_()
    out = OPS.combine(rows, weights, ROW_TK)
    assert out.flatten().tolist() == [4 * 1 + 1 * 2, 2 * 3 + 5 * 4, 3 * 5 + 6 * 6]
    out.backward(torch.tensor([[1.0], [10.0], [100.0]]))
    assert rows.grad is not None
    assert weights.grad is not None
    assert rows.grad.flatten().tolist() == [2, 30, 500, 1, 40, 600]
    assert weights.grad.tolist() == [[4, 1], [20, 50], [300, 600]]


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, weights = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((3, 5), (6, 5), (3, 2))
    )
    assert torch.autograd.gradcheck(lambda x: OPS.dispatch(x, TOKEN_R, ROW_TK), (x,))
    assert torch.autograd.gradcheck(lambda y, weights: OPS.combine(y, weights, ROW_TK), (y, weights))


@pytest.mark.usefixtures("triton_is_there")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [8, 24, 1100])
def test_kernels_of_the_experts_sums_equal_the_reference(width: int, dtype: torch.dtype) -> None:
    from nmoe.model.ops.triton.routing import spread_rows, sum_rows

    generator = torch.Generator().manual_seed(width)
    row_TK = torch.randperm(12, generator=generator).view(4, 3)
    y = torch.randn(12, width, generator=generator).to(dtype)
    weights, upstream = torch.rand(4, 3, generator=generator), torch.randn(4, width, generator=generator).to(dtype)
    y_leaf, weights_leaf = y.double().requires_grad_(), weights.double().requires_grad_()
    expected = TorchOps().sum_rows(y_leaf, weights_leaf, row_TK)
    expected.backward(upstream.double())
    grad_y, grad_weights = spread_rows(upstream, y, weights, row_TK)
    pairs = [
        (sum_rows(y, weights, row_TK), expected),
        (sum_rows(y, None, row_TK), y.double()[row_TK].sum(1)),
        (grad_y, y_leaf.grad),
        (grad_weights, weights_leaf.grad),
    ]
    for ours, theirs in pairs:
        assert relative_error(ours, theirs) < TOLERANCE[dtype]
    assert [ours.dtype for ours, _ in pairs] == [dtype, dtype, dtype, torch.float32]


@pytest.mark.usefixtures("triton_is_there")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 16), (11, 16), (3, 40)])
def test_rotary_kernel_equals_the_reference(heads: int, width: int, dtype: torch.dtype) -> None:
    from nmoe.model.ops.triton.elementwise import rotate_triton

    generator = torch.Generator().manual_seed(heads)
    x = torch.randn(5, heads + 2, width, generator=generator).to(dtype)[:, 1 : heads + 1]
    angle = torch.randn(5, 1, width // 2, generator=generator)
    out = rotate_triton(x, angle.cos(), angle.sin())
    assert out.dtype == dtype
    expected = OPS.rotate(x.double(), angle.double().cos(), angle.double().sin())
    assert relative_error(out, expected) < TOLERANCE[dtype]
