"""Every recipe set up for released shapes of 20B, 30B and 120B parameters on torch's `meta` device, which has shapes and no values:
model, adapter, head, optimizer, engine, and a pass forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nmoe.config.tables.optimizer import OptimizerSection
from nmoe.engine.native.cache import bytes_per_block
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.learner.batch import Batch
from nmoe.learner.forward import score, split
from nmoe.learner.learner import Learner, _scored
from nmoe.learner.objectives import (
    Objective,
    classification,
    clip,
    cross_entropy,
    reference_divergence,
    total,
    value_loss,
)
from nmoe.learner.objectives.dpo import dpo
from nmoe.learner.routing import auxiliary_loss, count_load, load_shares
from nmoe.model.checkpoint import new_model
from nmoe.model.families import gpt_oss, qwen3_moe
from nmoe.model.head import Head
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.moe import RouterTrace
from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import Ranks

META = torch.device("meta")

_GPT_OSS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "tie_word_embeddings": False,
}
# As their config.json says: the family's file, its settings, and how many billions of parameters the release has.
SHAPES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "gpt-oss-20b": (gpt_oss, _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20.9),
    "Qwen3-30B-A3B": (
        qwen3_moe,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        },
        30.5,
    ),
    "gpt-oss-120b": (gpt_oss, _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116.8),
}


def model(name: str) -> Transformer:
    family, raw, _ = SHAPES[name]
    config = family.config_from_hf(raw).model_copy(update={"router_aux_loss_coef": 0.001})
    return new_model(config, torch.bfloat16, META)


def batch(columns: tuple[str, ...], pairs: bool) -> Batch:
    """Two sequences of 96 and 32 tokens."""
    tokens = 128
    scored_T = torch.arange(tokens) % 4 > 0
    values = {name: torch.zeros(tokens, dtype=torch.int64 if name == "labels_T" else torch.float32) for name in columns}
    given = {"pairs": ((0, True), (0, False))} if pairs else {}
    ids_T = torch.zeros(tokens, dtype=torch.int64)
    return Batch((96, 32), ids_T, ids_T, scored_T, scored_T.float(), **values, **given)


POLICY = ("advantages_T", "behaviour_logprobs_T", "reference_logprobs_T")
# Of each recipe: what it minimises, the head's outputs (0: none), whether the head is all that is computed, and its columns.
RECIPES: dict[str, tuple[Callable[[], Objective], int, bool, tuple[str, ...]]] = {
    "pretrain and sft": (lambda: cross_entropy, 0, False, ()),
    "dpo": (lambda: dpo("sigmoid", 0.1), 0, False, ("reference_logprobs_T",)),
    "verifier": (lambda: classification, 2, False, ("labels_T",)),
    "grpo": (lambda: total(clip(0.2, 0.28, None), reference_divergence(0.1, "k3", False)), 0, False, POLICY),
    "ppo's critic": (lambda: value_loss(0.2), 1, True, ("returns_T", "old_values_T")),
    "ppo on one trunk": (
        lambda: total(clip(0.2, 0.28, None), value_loss(0.2, 0.5)),
        1,
        False,
        (*POLICY, "returns_T", "old_values_T"),
    ),
}


def passed(learner: Learner, whole: Batch, objective: Objective) -> Tensor:
    """One pass, as `Learner.forward_backward` makes it, up to what it would bring to the host."""
    ((micro, _, _),) = split(whole, learner.model, 4096, Ranks())
    trace = RouterTrace()
    outputs = score(learner.model, micro, trace, 1.0, learner.head, learner.head_only)
    loss, _ = objective(outputs, _scored(micro))
    config = learner.model.config
    load_YE = count_load(trace, config.experts)
    assert load_YE.shape == (config.layers, config.experts)
    loss = loss + auxiliary_loss(trace, load_shares(load_YE), micro.tokens, config.router_aux_loss_coef)
    loss.backward()
    return loss


# All of them for the smallest shape, and for the others what trains most and least.
CASES = [
    (shape, recipe)
    for shape in SHAPES
    for recipe in [*(RECIPES if shape == "gpt-oss-20b" else ["ppo on one trunk"]), "grpo of an adapter"]
]


@pytest.mark.parametrize(("shape", "recipe"), CASES)
def test_a_recipe_is_set_up(shape: str, recipe: str) -> None:
    own, lora = model(shape), None
    if recipe.endswith(" of an adapter"):
        recipe = recipe.removesuffix(" of an adapter")
        lora = Lora(own, LoraSettings(rank=8), choose(own, ()), "base", "none")
    make, outputs, head_only, columns = RECIPES[recipe]
    kind = "value" if "ppo" in recipe else "step"
    head = Head(own.config.hidden_size, outputs, kind) if outputs else None
    learner = Learner(own, OptimizerSection(learning_rate=1e-5), 10, 4096, lora=lora, head=head, head_only=head_only)
    loss = passed(learner, batch(columns, recipe == "dpo"), make())
    assert loss.device == META
    # Masters in float32 of what is in bfloat16, each with a gradient of its shape, none on the host.
    assert len(learner.optimizer.masters) == len(learner.optimizer.parameters) > 0
    for name, parameter, master in zip(
        learner.optimizer.names, learner.optimizer.parameters, learner.optimizer.masters, strict=True
    ):
        assert master.device == META, name
        assert master.dtype == torch.float32, name
        assert master.grad is not None, name
        assert master.grad.shape == parameter.shape, name
        master.grad = None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_its_parameters_and_an_engine(shape: str) -> None:
    own, billions = model(shape), SHAPES[shape][2]
    assert sum(parameter.numel() for parameter in own.parameters()) / 1e9 == pytest.approx(billions, abs=0.06)
    engine = LLMEngine(own, 256, cache_bytes=8 * 2**30)
    assert engine.cache.attention.keys.device == META
    config, size = own.config, bytes_per_block(own.config, torch.bfloat16)
    keys = config.layers * config.kv_heads * config.head_dim
    assert size == 16 * (2 * keys * 2 + config.layers * config.experts_per_token * 2)
    assert engine.scheduler.blocks.blocks == 8 * 2**30 // size
    assert math.prod(engine.cache.attention.keys.shape) == engine.scheduler.blocks.blocks * 16 * keys
