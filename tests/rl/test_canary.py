"""The canary against engines whose weights are wrong in seven ways, as files, names and digests do not show."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import torch
from tiny_models import MOE, peaked_model

from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import new_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.rl.canary import LearnerCanary
from nmoe.types import Sample, Sampling

Draw = random.Random


def model_of(**changes: Any) -> Transformer:
    return peaked_model(ModelConfig(**(MOE | changes)), 0)


def sampled(model: Transformer, canary: LearnerCanary) -> list[tuple[tuple[int, ...], Sample]]:
    engine, groups = LLMEngine(model, 16), []
    for number, prompt in enumerate(canary.prompts):
        groups.append(engine.add(Request(prompt, 1, Sampling(canary.tokens, seed=1), str(number))))
    while not engine.idle:
        engine.step()
    return [(group.request.prompt_ids, group.samples[0]) for group in groups if group.samples[0] is not None]


def difference(model: Transformer, learner: Learner) -> tuple[float, float, LearnerCanary]:
    canary = LearnerCanary(learner)
    largest, coverage = canary.difference(sampled(model, canary))
    while canary.more_prompts():
        largest, coverage = canary.difference(sampled(model, canary))
    return largest, coverage, canary


def experts_swapped(model: Transformer, draw: Draw, last: Transformer) -> None:
    moe = draw.choice(model.moe_layers())
    one, other = draw.sample(range(moe.experts), 2)
    for weights in (moe.gate_up, moe.down):
        assert weights is not None
        weights.data[[one, other]] = weights.data[[other, one]].clone()


def expert_stale(model: Transformer, draw: Draw, last: Transformer) -> None:
    layer = draw.randrange(len(model.moe_layers()))
    moe, old = model.moe_layers()[layer], last.moe_layers()[layer]
    expert = draw.randrange(moe.experts)
    assert moe.down is not None
    assert old.down is not None
    moe.down.data[expert] = old.down.data[expert]


def projection_transposed(model: Transformer, draw: Draw, last: Transformer) -> None:
    square = [p for p in model.parameters() if p.ndim == 2 and p.shape[0] == p.shape[1]]
    weight = draw.choice(square)
    weight.data = weight.data.T.clone()


def repacking_skipped(model: Transformer, draw: Draw, last: Transformer) -> None:
    """All experts of a layer compute with the weights of the version before."""
    layer = draw.randrange(len(model.moe_layers()))
    moe, old = model.moe_layers()[layer], last.moe_layers()[layer]
    for new, before in ((moe.gate_up, old.gate_up), (moe.down, old.down)):
        assert new is not None
        assert before is not None
        new.data.copy_(before.data)


def bf16_round_trip(model: Transformer, draw: Draw, last: Transformer) -> None:
    weight = draw.choice([p for p in model.parameters() if p.ndim >= 2])
    weight.data = weight.data.bfloat16().float()


def adapter_scale_halved(model: Transformer, draw: Draw, last: Transformer) -> None:
    """The learner's weight is base + B A; the engine's is base + B A / 2."""
    weight = draw.choice([p for p in model.parameters() if p.ndim == 2])
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    b, a = (torch.randn(*shape, generator=generator) for shape in ((len(weight), 2), (2, weight.shape[1])))
    weight.data -= 0.5 * 0.01 * b @ a


def last_versions_layer(model: Transformer, draw: Draw, last: Transformer) -> None:
    layer = draw.randrange(len(model.blocks))
    model.blocks[layer].load_state_dict(last.blocks[layer].state_dict())


KINDS = (
    experts_swapped,
    expert_stale,
    projection_transposed,
    repacking_skipped,
    bf16_round_trip,
    adapter_scale_halved,
    last_versions_layer,
)


def scores(model: Transformer, tokens: list[tuple[int, ...]]) -> list[list[float]]:
    engine = LLMEngine(model, 16)
    groups = [engine.add_scoring(ids, 1.0, str(number)) for number, ids in enumerate(tokens)]
    while not engine.idle:
        engine.step()
    return [list(group.scores) for group in groups]


def test_an_engine_with_the_learners_weights_passes() -> None:
    for changes in ({}, {"experts": 0}, {"tie_embeddings": True}):
        model = model_of(**changes)
        learner = Learner(model, OptimizerSection(learning_rate=1e-3), 10, 4096)
        largest, coverage, canary = difference(deepcopy(model), learner)
        assert largest <= 1e-5 < canary.bound()
        assert coverage >= 0.99


def test_forty_corruptions_drawn_at_random_are_caught() -> None:
    """All whose effect on the canary's own tokens exceeds the bound, by the scores of the engine's own code; half of the draws at
    least have such an effect."""
    model = model_of()
    learner = Learner(model, OptimizerSection(learning_rate=1e-3), 10, 4096)
    draw, caught = random.Random(3), []
    for number in range(40):
        last, engine = deepcopy(model), deepcopy(model)
        torch.manual_seed(number)
        for parameter in last.parameters():
            parameter.data += 1e-3 * torch.randn_like(parameter)
        corrupt = KINDS[number % len(KINDS)]
        corrupt(engine, draw, last)
        largest, coverage, canary = difference(engine, learner)
        assert coverage >= 0.99
        tokens = [(*prompt, *sample.token_ids) for prompt, sample in sampled(engine, canary)]
        pairs = zip(scores(model, tokens), scores(engine, tokens), strict=True)
        effect = max(
            abs(one - other)
            for true, wrong in pairs
            for one, other in list(zip(true, wrong, strict=True))[len(canary.prompts[0]) - 1 :]
        )
        if effect > canary.bound():
            assert largest > canary.bound(), (corrupt.__name__, effect)
            caught.append(corrupt)
        else:
            assert largest < 3 * canary.bound(), (corrupt.__name__, effect)
    assert len(caught) >= 30
    assert set(caught) == set(KINDS)


def test_the_bound_of_other_precisions_is_the_first_comparisons() -> None:
    model = new_model(ModelConfig(**MOE), torch.bfloat16, torch.device("cpu"))
    model.load_state_dict(model_of().state_dict())
    learner = Learner(model, OptimizerSection(learning_rate=1e-3), 10, 4096)
    canary = LearnerCanary(learner)
    assert canary.bound() == 1e-4
    largest, _ = canary.difference(sampled(model, canary))
    assert canary.bound() == 3 * largest
    # A first comparison that is far off does not pass by its own measure.
    wrong = deepcopy(model)
    with torch.no_grad():
        wrong.embedding.weight.mul_(-1)
    canary = LearnerCanary(learner)
    largest, _ = canary.difference(sampled(wrong, canary))
    assert largest > canary.bound() == 1.5
