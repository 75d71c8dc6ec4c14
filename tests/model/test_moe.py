"""Mixture of experts: the router by hand, grouped experts against the loop, the layer against a double loop."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.config import ModelConfig
from nmoe.model.moe import (
    ExpertsByGroupedMM,
    ExpertsByLoop,
    ExpertsByPadding,
    ExpertWeights,
    MoE,
    Router,
    RouterTrace,
    fastest_computation,
    grouped_mm_fits,
)


def config(**changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "vocab_size": 8,
        "layers": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 2,
        "context_tokens": 8,
    }
    experts = {"hidden_size": 8, "experts": 5, "experts_per_token": 2, "expert_width": 12}
    return ModelConfig(**(shape | experts | changes))


def router_of(logits: list[float], **changes: Any) -> tuple[Router, Tensor]:
    """A router and one token on which its logits are these."""
    router = Router(config(hidden_size=len(logits), experts=len(logits), **changes))
    with torch.no_grad():
        router.weight.copy_(torch.diag(torch.tensor(logits)))
    return router, torch.ones(1, len(logits))


SOFTMAX = [math.log(1), math.log(2), math.log(5)]  # scores 1/8, 2/8, 5/8
SIGMOID = [math.log(0.2 / 0.8), 0.0, math.log(0.8 / 0.2)]  # scores 0.2, 0.5, 0.8


@pytest.mark.parametrize(
    ("logits", "scores", "renormalize", "weights"),
    [
        (SOFTMAX, "softmax", True, [5 / 7, 2 / 7]),
        (SOFTMAX, "softmax", False, [5 / 8, 2 / 8]),
        (SIGMOID, "sigmoid", True, [8 / 13, 5 / 13]),
        (SIGMOID, "sigmoid", False, [0.8, 0.5]),
    ],
)
def test_router_by_hand(logits: list[float], scores: str, renormalize: bool, weights: list[float]) -> None:
    router, x = router_of(logits, router_scores=scores, renormalize=renormalize)
    trace = RouterTrace()
    weights_TK, chosen_TK = router(x, trace)
    assert chosen_TK.tolist() == [[2, 1]]
    assert weights_TK[0].tolist() == pytest.approx(weights, abs=1e-6)
    assert trace.chosen_TK[0].tolist() == [[2, 1]]
    expected = [1 / 8, 2 / 8, 5 / 8] if scores == "softmax" else [0.2, 0.5, 0.8]
    assert trace.scores_TE[0][0].tolist() == pytest.approx(expected, abs=1e-6)
    assert trace.routes().dtype == torch.int16
    assert trace.routes().tolist() == [[[2, 1]]]


def test_groups_limit_the_choice_and_a_factor_scales_the_weights() -> None:
    router = Router(
        config(
            experts=6,
            experts_per_token=2,
            router_scores="sigmoid",
            router_groups=3,
            router_groups_kept=1,
            router_scale=2.5,
        )
    )
    scores = torch.tensor([0.9, 0.1, 0.6, 0.5, 0.2, 0.8])  # pairs sum to 1.0, 1.1, 1.0: the best expert's group loses
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.logit(scores)
    x = torch.zeros(1, router.weight.shape[1])
    x[0, 0] = 1
    weights_TK, chosen_TK = router(x, RouterTrace())
    assert chosen_TK.tolist() == [[2, 3]]
    assert weights_TK[0].tolist() == pytest.approx([2.5 * 6 / 11, 2.5 * 5 / 11], abs=1e-6)
    router.bias[0] = 0.3  # now 1.3 for the first pair, and within it the biased first
    weights_TK, chosen_TK = router(x, RouterTrace())
    assert chosen_TK.tolist() == [[0, 1]]
    assert weights_TK[0].tolist() == pytest.approx([2.25, 0.25], abs=1e-6)


def test_a_linear_bias_is_part_of_the_score() -> None:
    router, x = router_of(SOFTMAX, router_linear_bias=True)
    assert router.linear_bias is not None
    with torch.no_grad():
        router.linear_bias.copy_(torch.tensor([5.0, 1.0, 1.0]).log())  # scores 1 : 2 : 5 become 5 : 2 : 5
    assert [round(w, 4) for w in router(x, RouterTrace())[0][0].tolist()] == [0.5, 0.5]


def test_bias_moves_the_choice_and_never_the_weights() -> None:
    router, x = router_of(SOFTMAX)
    router.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    trace = RouterTrace()
    weights_TK, chosen_TK = router(x, trace)
    assert chosen_TK.tolist() == [[0, 2]]  # 1/8 + 1 before 5/8 before 2/8
    assert weights_TK[0].tolist() == pytest.approx([1 / 6, 5 / 6], abs=1e-6)
    assert trace.biases_E[0].tolist() == [1.0, 0.0, 0.0]
    assert trace.scores_TE[0][0].tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=1e-6)
    assert "bias" not in dict(router.named_parameters())
    assert "bias" in router.state_dict()


def test_replay_takes_the_recorded_picks_and_notes_its_own() -> None:
    router, x = router_of(SOFTMAX)
    trace = RouterTrace(replay=torch.tensor([[[0, 1]]], dtype=torch.int16))
    weights_TK, chosen_TK = router(x, trace)
    assert chosen_TK.tolist() == [[0, 1]]
    assert weights_TK[0].tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-6)
    assert trace.chosen_TK[0].tolist() == [[2, 1]]


def test_router_works_in_fp32_whatever_the_tokens_are_in() -> None:
    generator = torch.Generator().manual_seed(0)
    router = Router(config())
    with torch.no_grad():
        router.weight.copy_(torch.randn(5, 8, generator=generator))
    x = torch.randn(6, 8, generator=generator).bfloat16()
    low, full = router(x, RouterTrace()), router(x.float(), RouterTrace())
    assert low[0].dtype == torch.float32
    assert torch.equal(low[0], full[0])
    assert torch.equal(low[1], full[1])


@pytest.mark.parametrize(
    ("dtype", "width", "counts", "padded"),
    [
        (torch.bfloat16, 16, [8, 2, 3, 3], True),  # small products: 32 rows for 16 are cheaper than four calls
        (torch.bfloat16, 16, [13, 1, 1, 1], False),  # 52 rows for 16
        (torch.bfloat16, 512, [20, 16, 16, 14], True),  # 80 for 66
        (torch.bfloat16, 512, [32, 10, 12, 12], False),  # 128 for 66: an upcycled model's first routes
        (torch.bfloat16, 512, [80, 80, 80, 80], False),  # products that are worth a call each
        (torch.float32, 16, [8, 2, 3, 3], True),
        (torch.float32, 512, [20, 16, 16, 14], False),
    ],
)
def test_rows_are_padded_where_that_is_fast(dtype: torch.dtype, width: int, counts: list[int], padded: bool) -> None:
    x_RD, shape = torch.zeros(sum(counts), width, dtype=dtype), (len(counts), width, 2 * width)
    weights = ExpertWeights(
        torch.zeros(shape, dtype=dtype), torch.zeros(len(counts), width, width, dtype=dtype), None, None
    )
    assert (fastest_computation(x_RD, torch.tensor(counts), weights) is ExpertsByPadding) == padded


COUNTS = [[3, 0, 4, 1, 2], [0, 0, 10, 0, 0], [10, 0, 0, 0, 0], [0, 0, 0, 0, 10], [2] * 5]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("biases", "limit"), [(False, 0.0), (True, 1.5)])
def test_the_ways_of_experts_are_equal_in_values_and_gradients(counts: list[int], biases: bool, limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(10, 8), (5, 8, 24), (5, 12, 8), *([(5, 24), (5, 8)] if biases else [])]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    upstream = torch.randn(10, 8, generator=generator)
    results = []
    for experts in (ExpertsByGroupedMM, ExpertsByLoop, ExpertsByPadding):
        tensors = [t.clone().requires_grad_() for t in inputs]
        out = experts(tensors[0], torch.tensor(counts), ExpertWeights(*tensors[1:], limit=limit)).run()
        out.backward(upstream)
        results.append((out.detach(), *(t.grad for t in tensors)))
    for grouped, loop, padded in zip(*results, strict=True):
        # The libraries add in orders of their own, which differ by processor.
        torch.testing.assert_close(grouped, loop, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(padded, loop, rtol=1e-4, atol=1e-4)
    # By hand for the first row that has an expert, so that the two are not wrong alike.
    x, gate_up, down = inputs[:3]
    first = next(e for e, count in enumerate(counts) if count)
    hidden = x[0] @ gate_up[first] + (inputs[3][first] if biases else 0)
    gate, up = hidden[:12], hidden[12:]
    if limit:
        assert max(gate.max(), up.abs().max()) > limit
        gate = torch.where(gate > limit, torch.full_like(gate, limit), gate)
        up = torch.where(up.abs() > limit, limit * up.sign(), up)
        active = gate / (1 + (-1.702 * gate).exp()) * (1 + up)
    else:
        active = gate / (1 + (-gate).exp()) * up
    by_hand = active @ down[first] + (inputs[4][first] if biases else 0)
    torch.testing.assert_close(results[0][0][0], by_hand, rtol=1e-5, atol=1e-5)
    unused = [e for e, count in enumerate(counts) if not count]
    for gradient in results[0][2:]:
        assert (gradient[unused] == 0).all()


def test_grouped_product_is_taken_where_its_strides_fit() -> None:
    assert grouped_mm_fits(torch.zeros(3, 8), 12)
    assert not grouped_mm_fits(torch.zeros(3, 8), 10)
    assert not grouped_mm_fits(torch.zeros(3, 8), 12, 3)
    assert not grouped_mm_fits(torch.zeros(3, 6), 12)
    assert not grouped_mm_fits(torch.zeros(3, 8, dtype=torch.float64), 12)
    assert not grouped_mm_fits(torch.zeros(3, 8, dtype=torch.float16), 8)
    assert grouped_mm_fits(torch.zeros(3, 8, dtype=torch.bfloat16), 16)
    assert not grouped_mm_fits(torch.zeros(3, 8, dtype=torch.bfloat16), 12)


def double_loop(moe: MoE, x_TD: Tensor) -> Tensor:
    """The layer's definition: token by token, expert by expert, every expert of the choice weighed by its score."""
    width = moe.down.shape[1]
    rows = []
    for x_D in x_TD:
        logits_E = moe.router.weight @ x_D
        scores_E = torch.sigmoid(logits_E) if moe.router.sigmoid else torch.exp(logits_E) / torch.exp(logits_E).sum()
        biased = (scores_E + moe.router.bias).tolist()
        chosen = sorted(range(len(biased)), key=lambda e: -biased[e])[: moe.router.experts_per_token]
        total = sum(scores_E[e] for e in chosen) if moe.router.renormalize else 1.0
        out_D = torch.zeros_like(x_D)
        for e in chosen:
            gate, up = x_D @ moe.gate_up[e, :, :width], x_D @ moe.gate_up[e, :, width:]
            out_D = out_D + scores_E[e] / total * ((F.silu(gate) * up) @ moe.down[e])
        if moe.shared is not None:
            gate, up = (moe.shared.gate_up_proj.weight @ x_D).chunk(2)
            out_D = out_D + moe.shared.down_proj.weight @ (F.silu(gate) * up)
        rows.append(out_D)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renormalize": False},
        {"router_scores": "sigmoid"},
        {"router_scores": "sigmoid", "renormalize": False, "experts_per_token": 3},
        {"shared_experts": 2},
        {"experts_per_token": 1},
        {"experts_per_token": 5},
        {"expert_width": 10},  # a width that the grouped product does not take
    ],
    ids=str,
)
def test_layer_equals_the_double_loop_in_values_and_gradients(changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    moe = MoE(config(**changes))
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        moe.router.bias.copy_(0.2 * torch.randn(5, generator=generator))
    x = torch.randn(9, 8, generator=generator)
    upstream = torch.randn(9, 8, generator=generator)
    results = []
    for call in (lambda x: moe(x, RouterTrace()), lambda x: double_loop(moe, x)):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        out.backward(upstream)
        results.append([out.detach(), leaf.grad, *(p.grad.clone() for p in moe.parameters())])
    for layer, loop in zip(*results, strict=True):
        torch.testing.assert_close(layer, loop, rtol=1e-4, atol=1e-5)
