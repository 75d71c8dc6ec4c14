"""Recurrent layers against the gated delta rule written out head by head, and against themselves, cut and packed in other ways."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nmoe.model.config import DeltaNet
from nmoe.model.ops import delta
from nmoe.model.packed import PackedAttention
from nmoe.model.recurrence import RecurrentLayer, RecurrentState, Spans, run

CPU = torch.device("cpu")
SHAPE = DeltaNet(key_heads=2, value_heads=4, key_dim=3, value_dim=5, conv_tokens=4)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(dtype: torch.dtype = torch.float64) -> RecurrentLayer:
    return RecurrentLayer(0, SHAPE, draw(SHAPE.channels, 4, seed=9).to(dtype))


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """What the convolution takes, logarithms of decays, and strengths."""
    decay, beta = -draw(tokens, 4, seed=2).exp(), draw(tokens, 4, seed=3).sigmoid()
    return draw(tokens, SHAPE.channels, seed=1).to(dtype), decay.to(dtype), beta.to(dtype)


def by_hand(x_TW: Tensor, decay_TH: Tensor, beta_TH: Tensor, conv_WK: Tensor) -> Tensor:
    """One sequence, number by number: convolution, SiLU, rows of length one, and the rule in the form of its paper."""
    out = torch.zeros(len(x_TW), 4, 5, dtype=x_TW.dtype)
    memories = torch.zeros(4, 3, 5, dtype=x_TW.dtype)
    for t in range(len(x_TW)):
        mixed = sum(x_TW[t - back] * conv_WK[:, 3 - back] for back in range(4) if t >= back)
        mixed = mixed * mixed.sigmoid()
        for h in range(4):
            g = h // 2  # each key head serves two value heads that follow each other
            q, k = mixed[3 * g : 3 * g + 3], mixed[6 + 3 * g : 9 + 3 * g]
            q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
            v, beta = mixed[12 + 5 * h : 17 + 5 * h], beta_TH[t, h]
            forgets = torch.eye(3, dtype=x_TW.dtype) - beta * torch.outer(k, k)
            memories[h] = decay_TH[t, h].exp() * forgets @ memories[h] + beta * torch.outer(k, v)
            out[t, h] = memories[h].T @ q / 3**0.5
    return out


@pytest.mark.parametrize("lengths", [[1], [3], [70], [2, 40, 1, 9, 33]], ids=str)
def test_each_sequence_follows_the_rule_from_nothing(lengths: list[int]) -> None:
    x_TW, decay_TH, beta_TH = inputs(sum(lengths))
    out_THU, _ = run(layer(), Spans(lengths, CPU), x_TW, decay_TH, beta_TH, None, exact=False)
    for out, *own in zip(*(x.split(lengths) for x in (out_THU, x_TW, decay_TH, beta_TH)), strict=True):
        torch.testing.assert_close(out, by_hand(*own, layer().conv_WK), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_chunks_are_the_scan_with_its_gradients(length: int) -> None:
    shapes: list[tuple[int, ...]] = [
        (2, length, 4, 3),
        (2, length, 4, 3),
        (2, length, 4, 5),
        (2, length, 4),
        (2, length, 4),
    ]
    given = [draw(*shape, seed=i) for i, shape in enumerate([*shapes, (2, 4, 3, 5)])]
    given[1] = torch.nn.functional.normalize(given[1], dim=-1)
    given[3], given[4] = -given[3].exp(), given[4].sigmoid()
    found: list[Any] = []
    for form in (delta.scan, delta.by_chunks):
        leaves = [x.clone().requires_grad_() for x in given]
        out, memory = form(*leaves)
        loss = (out * draw(*out.shape, seed=7)).sum() + (memory * draw(*memory.shape, seed=8)).sum()
        found.append((out, memory, *torch.autograd.grad(loss, leaves)))
    for scanned, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, scanned, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("cut", [1, 2, 3, 17, 39])
def test_a_sequence_goes_on_from_its_state_to_the_bit(cut: int) -> None:
    """In exact numerics, wherever it is cut, whatever it runs beside, and token by token."""
    tokens = inputs(40 + 13, torch.float32)
    own = [x[:40] for x in tokens]
    whole, end = run(layer(torch.float32), Spans([40], CPU), *own, None, exact=True)
    first, state = run(layer(torch.float32), Spans([cut], CPU), *(x[:cut] for x in own), None, exact=True)
    # The rest beside another sequence, whose state is not a number.
    other = RecurrentState(*(torch.full_like(x, torch.nan) for x in (state.inputs_SKW, state.memory_SHCU)))
    both = RecurrentState(*(torch.cat(pair) for pair in zip(_parts(other), _parts(state), strict=True)))
    beside = [torch.cat([x[40:], x[cut:40]]) for x in tokens]
    rest, states = run(layer(torch.float32), Spans([13, 40 - cut], CPU), *beside, both, exact=True)
    assert torch.equal(torch.cat([first, rest[13:]]), whole)
    for part, expected in zip(_parts(states), _parts(end), strict=True):
        assert torch.equal(part[1:], expected)
    state_t = None
    for t in range(40):
        out, state_t = run(layer(torch.float32), Spans([1], CPU), *(x[t : t + 1] for x in own), state_t, exact=True)
        assert torch.equal(out, whole[t : t + 1])


def _parts(state: RecurrentState) -> tuple[Tensor, Tensor]:
    return state.inputs_SKW, state.memory_SHCU


def test_sequences_that_share_rows_each_run_through_them() -> None:
    """A prompt of three tokens with two answers, of two tokens and one: seven rows, of which six are given."""
    x_SW, decay_SH, beta_SH = inputs(6)
    place_T, rows_S = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5]), torch.tensor([0, 1, 2, 3, 4, 8])
    shared = PackedAttention([5, 4], CPU, shared=(rows_S, place_T)).recur(layer(), x_SW, decay_SH, beta_SH)
    apart = PackedAttention([5, 4], CPU).recur(layer(), x_SW[place_T], decay_SH[place_T], beta_SH[place_T])
    assert torch.equal(shared, apart[rows_S])
    assert not torch.allclose(shared[5], shared[3])
