"""The decoder: initialisation, its invariants, and the dense model against its definition."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.config import ModelConfig
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
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
