"""Every recipe set up for released shapes of 20B, 30B and 120B parameters on torch's `meta` device, which has shapes and no values:
all models that it trains or reads, adapters, heads, optimizers, an engine, and a pass forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.native.cache import bytes_per_block
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import (
    Objective,
    classification,
    clip,
    cross_entropy,
    reference_divergence,
    total,
    value_loss,
)
from nmoe.learner.objectives.base import Outputs, Scored
from nmoe.learner.objectives.dpo import dpo
from nmoe.learner.passes import deal, score, scored_columns
from nmoe.learner.routing import auxiliary_loss, count_load, load_shares
from nmoe.model.checkpoint import new_model
from nmoe.model.families import gpt_oss, qwen3_moe
from nmoe.model.head import Head
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.moe import RouterTrace
from nmoe.model.transformer import Transformer

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


def batch(columns: tuple[str, ...], pairs: bool, last_only: bool) -> Batch:
    """Two sequences of 96 and 32 tokens, scored at three of four tokens or at the last of each alone."""
    place_T = torch.arange(128)
    scored_T = (place_T == 95) | (place_T == 127) if last_only else place_T % 4 > 0
    values = {name: torch.zeros(128, dtype=torch.int64 if name == "labels_T" else torch.float32) for name in columns}
    given = {"pairs": ((0, True), (0, False))} if pairs else {}
    ids_T = torch.zeros(128, dtype=torch.int64)
    return Batch((96, 32), ids_T, ids_T, scored_T, scored_T.float(), **values, **given)


@dataclass(frozen=True)
class Trained:
    """A model that a recipe trains: what it minimises, its head's outputs and kind (None: no head), whether the head is all that
    is computed, and the columns that the loss reads."""

    objective: Callable[[], Objective]
    columns: tuple[str, ...] = ()
    head: tuple[int, str] | None = None
    head_only: bool = False
    pairs: bool = False
    last_only: bool = False


def preference(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry of one pair, without the check of the batch's values, which `meta` does not have."""
    assert outputs.head_NK is not None
    return softplus(outputs.head_NK[1] - outputs.head_NK[0]).sum(), {}


SAMPLED = ("advantages_T", "behaviour_logprobs_T")
COMPARED = (*SAMPLED, "reference_logprobs_T")
RETURNS = ("returns_T", "old_values_T")
IMITATION = Trained(lambda: cross_entropy)
POLICY = Trained(lambda: clip(0.2, 0.28), SAMPLED)
CLOSE_POLICY = Trained(lambda: total(clip(0.2, 0.28), reference_divergence(0.1, "k3", False)), COMPARED)
CRITIC = Trained(lambda: value_loss(0.2), RETURNS, (1, "value"), head_only=True)
# Of each recipe the models that it trains, and whether it reads another: a reference, a teacher, a meta-verifier.
RECIPES: dict[str, tuple[tuple[Trained, ...], bool]] = {
    "pretrain and sft": ((IMITATION,), False),
    "dpo": ((Trained(lambda: dpo("sigmoid", 0.1), ("reference_logprobs_T",), pairs=True),), True),
    "reward model": (
        (Trained(lambda: preference, (), (1, "reward"), head_only=True, pairs=True, last_only=True),),
        False,
    ),
    "verifier": ((Trained(lambda: classification, ("labels_T",), (2, "step")),), False),
    "grpo": ((CLOSE_POLICY,), True),
    "ppo with a critic": ((CLOSE_POLICY, CRITIC), True),
    "ppo on one trunk": (
        (Trained(lambda: total(clip(0.2, 0.28), value_loss(0.2, 0.5)), (*SAMPLED, *RETURNS), (1, "value")),),
        False,
    ),
    "distillation": ((POLICY,), True),
    "self-play": ((POLICY, IMITATION), True),
}


def passed(learner: Learner, whole: Batch, objective: Objective) -> Tensor:
    """One pass, as `Learner.forward_backward` makes it, up to what it would bring to the host."""
    ((on_host, _, _),) = deal(whole, 4096, 1)[0].parts
    micro = on_host.to(learner.model.device)
    trace = RouterTrace()
    outputs = score(learner.model, micro, trace, 1.0, learner.head, learner.head_only)
    loss, _ = objective(outputs, scored_columns(micro))
    config = learner.model.config
    load_YE = count_load(trace, config.experts)
    assert load_YE.shape == (len(learner.model.blocks), config.experts)
    loss = loss + auxiliary_loss(trace, load_shares(load_YE), micro.tokens, config.router_aux_loss_coef)
    loss.backward()
    return loss


@torch.no_grad()
def read(own: Transformer, whole: Batch) -> Tensor:
    """Log-probabilities of the scored tokens, as a reference or a teacher gives them."""
    ((on_host, _, _),) = deal(whole, 4096, 1)[0].parts
    return score(own, on_host.to(own.device), RouterTrace(), 1.0).logprobs_N


def cut(own: Transformer) -> None:
    """Leaves out all blocks but the first two, which have both kinds of attention. Blocks are alike, and a pass through each takes
    its time on `meta`, too."""
    own.blocks = own.blocks[:2]


@cache
def set_up(shape: str, part: Trained, adapts: bool = False) -> None:
    """The model with its learner, whole, and a pass: through all blocks for the policy and its adapter."""
    own = model(shape)
    lora = Lora(own, LoraSettings(rank=8), choose(own, ()), "base", "none") if adapts else None
    head = None if part.head is None else Head(own.config.hidden_size, *part.head)
    settings = OptimizerSection(learning_rate=1e-5)
    learner = Learner(own, settings, 10, 4096, lora=lora, head=head, head_only=part.head_only)
    optimizer = learner.optimizer
    assert optimizer.masters
    for name, master in zip(optimizer.names, optimizer.masters, strict=True):
        assert (master.device, master.dtype) == (META, torch.float32), name
    if part is not CLOSE_POLICY:
        cut(own)
    reached = {id(parameter) for module in (own, head, lora) if module is not None for parameter in module.parameters()}
    if part.head_only:
        reached.remove(id(own.head_weight))  # no logits
    loss = passed(learner, batch(part.columns, part.pairs, part.last_only), part.objective())
    assert loss.device == META
    # Gradients of what is in bfloat16 are its masters', each of the same shape, none on the host.
    for name, parameter, master in zip(optimizer.names, optimizer.parameters, optimizer.masters, strict=True):
        if id(parameter) in reached:
            assert master.grad is not None, name
            assert (master.grad.device, master.grad.shape) == (META, parameter.shape), name
            master.grad = None


@cache
def reads(shape: str) -> None:
    """A model that is only read."""
    own = model(shape).requires_grad_(False)
    cut(own)
    logprobs_N = read(own, batch((), pairs=False, last_only=False))
    assert (logprobs_N.device, logprobs_N.shape) == (META, (96,))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_recipe_is_set_up(shape: str, recipe: str) -> None:
    trained, frozen = RECIPES[recipe]
    for part in trained:
        set_up(shape, part)
    if frozen:
        reads(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_adapter_is_set_up(shape: str) -> None:
    set_up(shape, CLOSE_POLICY, adapts=True)


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
