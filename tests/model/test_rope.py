"""Rotary embedding: the table by hand, the turn as a complex product, the gradient by finite differences."""

import math

import pytest
import torch

from nmoe.model.ops.torch import TorchOps
from nmoe.model.rope import rope_table


def test_table_by_hand() -> None:
    cos, sin = rope_table(3, 4, 100.0)  # frequencies 1 and 100 ** (-2 / 4) = 0.1
    assert cos.tolist() == [pytest.approx([math.cos(p), math.cos(0.1 * p)], abs=1e-7) for p in range(3)]
    assert sin.tolist() == [pytest.approx([math.sin(p), math.sin(0.1 * p)], abs=1e-7) for p in range(3)]


def test_table_is_exact_far_out() -> None:
    cos, sin = rope_table(100_001, 6, 10_000.0)
    # An angle of 4641.6 in fp32 would be off by 2e-4.
    angle = 100_000 * 10_000.0 ** (-2 / 6)
    assert cos[100_000, 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert sin[100_000, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_turns_pairs_half_a_head_apart_as_complex_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator, dtype=torch.float64)
    cos, sin = (t.double().unsqueeze(1) for t in rope_table(5, 8, 50.0))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)
    torch.testing.assert_close(
        TorchOps().rotate(x, cos, sin), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-12
    )


def test_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)
    cos, sin = (t.double().unsqueeze(1) for t in rope_table(30, 8, 50.0))

    def score(query_at: int, key_at: int) -> float:
        turned = [TorchOps().rotate(x, cos[at : at + 1], sin[at : at + 1]) for x, at in ((q, query_at), (k, key_at))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(27, 23), abs=1e-6)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_gradient_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 2, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.unsqueeze(1) for t in rope_table(4, 6, 10.0))
    assert torch.autograd.gradcheck(lambda x: TorchOps().rotate(x, cos, sin), (x,))
