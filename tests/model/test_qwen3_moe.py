"""Parity with transformers' Qwen3-MoE: an independent implementation, our packed batch against its sequences one by one."""

import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nmoe.model.checkpoint import load_model
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention

LENGTHS = [5, 1, 17, 30, 9, 17]


def peaked_reference(tied: bool, norm_topk_prob: bool) -> Qwen3MoeForCausalLM:
    """Random weights at which every part counts: a head width that is not hidden / heads, norms away from one."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=40,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=norm_topk_prob,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    model = Qwen3MoeForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        model.lm_head.weight.mul_(4.0)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_logits_equal_transformers(tmp_path: Path, tied: bool, norm_topk_prob: bool) -> None:
    reference = peaked_reference(tied, norm_topk_prob)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert (model.head is None) == tied
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(64, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad():
        theirs = torch.cat([reference(ids.unsqueeze(0), use_cache=False).logits[0] for ids in sequences])
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        attend = PackedAttention(LENGTHS, positions.device)
        ours = model.logits(model(torch.cat(sequences), positions, attend, RouterTrace()))
    # A flat output would hide differences: the entropy must be at most half of what it could be.
    logprobs = theirs.log_softmax(-1)
    assert -(logprobs.exp() * logprobs).sum(-1).mean() <= 0.5 * math.log(64)
    torch.testing.assert_close(ours.log_softmax(-1), logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
