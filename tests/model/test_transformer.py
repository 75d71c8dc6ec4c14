"""The decoder and its recurrent layers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.config import DeltaNet, ModelConfig
from nmoe.model.moe import RouterTrace
from nmoe.model.ops import delta
from nmoe.model.packed import PackedAttention
from nmoe.model.recurrence import RecurrentLayer, RecurrentState, Spans, run
from nmoe.model.transformer import Transformer

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "context_tokens": 16,
    "experts": 4,
    "experts_per_token": 2,
    "expert_width": 32,
    "shared_experts": 1,
    "tie_embeddings": False,
}


def test_the_same_seed_gives_the_same_weights_whatever_ran_before() -> None:
    first = Transformer(ModelConfig(**SHAPE)).initialize(3)
    torch.manual_seed(123)
    used = Transformer(ModelConfig(**SHAPE)).initialize(4)
    with torch.no_grad():
        used.norm.weight.mul_(2)
        used.moe_layers()[0].router.bias.add_(1)
    different = used.embedding.weight.clone()
    used.initialize(3)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, used.state_dict()[name]), name
    assert not torch.equal(different, first.embedding.weight)


def test_initial_weights_have_the_deviations_they_should() -> None:
    state = Transformer(ModelConfig(**SHAPE)).initialize(0).state_dict()
    residual = (2 * 2) ** -0.5
    expected = {
        "embedding.weight": 0.02,
        "head.weight": 64**-0.5,
        "blocks.1.attention.qkv_proj.weight": 64**-0.5,
        "blocks.1.attention.o_proj.weight": 64**-0.5 * residual,
        "blocks.1.ffn.router.weight": 64**-0.5,
        "blocks.1.ffn.gate_up": 64**-0.5,
        "blocks.1.ffn.down": 32**-0.5 * residual,
        "blocks.1.ffn.shared.gate_up_proj.weight": 64**-0.5,
        "blocks.1.ffn.shared.down_proj.weight": 32**-0.5 * residual,
    }
    for name, deviation in expected.items():
        # 256 numbers or more: the deviation of a deviation is below 1 / sqrt(2 * 256) = 4.4 %.
        assert state[name].std().item() == pytest.approx(deviation, rel=0.15), name
        assert abs(state[name].mean().item()) < 0.25 * deviation
    assert (state["blocks.0.attention_norm.weight"] == 1).all()
    assert (state["blocks.0.ffn.router.bias"] == 0).all()


def dense_by_definition(model: Transformer, ids_T: Tensor) -> Tensor:
    """Logits of one sequence by the textbook: no packing, no fused projection, complex rotations, a quadratic mask."""
    config, tokens = model.config, ids_T.shape[0]
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    turn_T1c = torch.polar(torch.ones(()), torch.outer(torch.arange(tokens), frequencies)).unsqueeze(1)
    future_TT = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, config.norm_eps)

    def turn(x_TNC: Tensor) -> Tensor:
        turned = torch.complex(*x_TNC.chunk(2, -1)) * turn_T1c
        return torch.cat([turned.real, turned.imag], -1)

    x = model.embedding.weight[ids_T]
    for block in model.blocks:
        attention, ffn = block.attention, block.ffn
        sizes = [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
        weights = attention.qkv_proj.weight.split(sizes)
        q, k, v = ((norm(x, block.attention_norm.weight) @ w.T).view(tokens, -1, config.head_dim) for w in weights)
        if config.qk_norm:
            q, k = norm(q, attention.q_norm.weight), norm(k, attention.k_norm.weight)
        k, v = (t.repeat_interleave(config.heads // config.kv_heads, 1) for t in (turn(k), v))
        scores = torch.einsum("qhc,khc->hqk", turn(q), k) / config.head_dim**0.5
        mixed = torch.einsum("hqk,khc->qhc", scores.masked_fill(future_TT, -torch.inf).softmax(-1), v)
        x = x + mixed.reshape(tokens, -1) @ attention.o_proj.weight.T
        gate, up = (norm(x, block.ffn_norm.weight) @ ffn.gate_up_proj.weight.T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ ffn.down_proj.weight.T
    return norm(x, model.norm.weight) @ (model.embedding if model.head is None else model.head).weight.T


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_dense_model_equals_its_definition(tiny_model: Callable[..., Transformer], qk_norm: bool, tied: bool) -> None:
    model = tiny_model(experts=0, qk_norm=qk_norm, tie_embeddings=tied, rope_theta=100.0)
    ids = torch.randint(48, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attend = PackedAttention([40], ids.device)
        ours = model.logits(model(ids, torch.arange(40), attend, RouterTrace()))
        torch.testing.assert_close(ours, dense_by_definition(model, ids), rtol=0, atol=1e-4)


def test_each_cpu_capability_compiles_into_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(ModelConfig(**SHAPE))
    directories = []
    for capability in ("AVX512", "AVX2", "NO AVX"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored at the end, whatever the model sets
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        model.compile_feed_forward()
        directories.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    assert [directory.name for directory in directories] == ["avx512", "avx2", "no_avx"]
    assert len({directory.parent for directory in directories}) == 1
    assert all(directory.is_absolute() for directory in directories)


def test_the_users_own_compiler_cache_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    Transformer(ModelConfig(**SHAPE)).compile_feed_forward()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"


CPU = torch.device("cpu")
RECURRENT_SHAPE = DeltaNet(key_heads=2, value_heads=4, key_dim=3, value_dim=5, conv_tokens=4)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(dtype: torch.dtype = torch.float64) -> RecurrentLayer:
    return RecurrentLayer(0, RECURRENT_SHAPE, draw(RECURRENT_SHAPE.channels, 4, seed=9).to(dtype))


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """What the convolution takes, logarithms of decays, and strengths."""
    decay, beta = -draw(tokens, 4, seed=2).exp(), draw(tokens, 4, seed=3).sigmoid()
    return draw(tokens, RECURRENT_SHAPE.channels, seed=1).to(dtype), decay.to(dtype), beta.to(dtype)


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
