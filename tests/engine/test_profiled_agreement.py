"""Experts in a profile: the engine samples from the same quantised weights that the learner trains, before and after a step, and a
checkpoint goes on with the same numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nmoe.config.tables.model import ExpertProfile, OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.config import Numerics
from nmoe.model.expert_profile import dequantised
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.types import Sampling

MakeModel = Callable[..., Transformer]
PROMPTS = [(7, 3, 41), (11, 5, 2, 30, 8), (9,)]


def learner_of(model: Transformer, profile: ExpertProfile) -> Learner:
    return Learner(set_expert_profile(model, profile), OptimizerSection(learning_rate=1e-2), 10, 64)


def texts(seed: int) -> Batch:
    ids = torch.randint(48, (40,), generator=torch.Generator().manual_seed(seed))
    return Batch((39,), ids[:-1], ids[1:], scored_T=torch.ones(39, dtype=torch.bool), weights_T=torch.ones(39) / 39)


def differences(learner: Learner, engine: NativeEngine) -> torch.Tensor:
    """How far the engine's log-probabilities of samples are from those that the learner gives them along the same routes."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        request = Request(prompt, 1, Sampling(12, seed=i), f"r{i}")
        sample = engine.run(engine.generate(request))[0]
        ids = torch.tensor([*prompt, *sample.token_ids])
        scored_T = torch.arange(1, len(ids)) >= len(prompt)
        routes_TYK = torch.as_tensor(sample.routes)[: len(ids) - 1]
        batch = Batch(
            (len(ids) - 1,), ids[:-1], ids[1:], scored_T=scored_T, weights_T=scored_T.float(), routes_TYK=routes_TYK
        )
        found.append(learner.logprobs(batch).result() - torch.tensor(sample.logprobs))
    return torch.cat(found).abs()


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("profile", ["bf16", "fp8", "nvfp4"])
def test_sampler_and_learner_use_the_same_experts(
    tiny_model: MakeModel, profile: ExpertProfile, numerics: Numerics
) -> None:
    learner = learner_of(tiny_model().set_numerics(numerics), profile)
    engine = NativeEngine(learner.model, 4)
    learner.publish(engine)
    # With exact numerics a row has the same bits in any batch. With fast ones sums differ in their last bits, and then a number may
    # round to the next of its profile, a step of 2^-3 (fp8) or 2^-7 (bf16) of it; rows in nvfp4 are not rounded.
    bound = {"exact": 1e-6, "fast": {"bf16": 1e-3, "fp8": 1e-2, "nvfp4": 1e-6}[profile]}[numerics]
    assert differences(learner, engine).mean() <= bound
    before = learner.logprobs(texts(0)).result()
    learner.forward_backward(texts(0), cross_entropy)
    learner.optim_step()
    learner.publish(engine)
    for moe in learner.model.moe_layers():
        now = torch.stack([dequantised(expert, profile) for expert in moe.down])
        assert torch.equal(moe.profile.weight("down", moe.down), now.to(moe.down))
    assert (learner.logprobs(texts(0)).result() - before).abs().max() > 0.05
    assert differences(learner, engine).mean() <= bound


@pytest.mark.parametrize("profile", ["fp8", "nvfp4"])
def test_a_checkpoint_goes_on_with_the_same_numbers(
    tiny_model: MakeModel, tmp_path: Path, profile: ExpertProfile
) -> None:
    def step(learner: Learner, seed: int) -> float:
        loss = learner.forward_backward(texts(seed), cross_entropy).result().loss
        learner.optim_step()
        return loss

    straight = learner_of(tiny_model(), profile)
    step(straight, 0)
    state = straight.save(tmp_path)
    resumed = learner_of(tiny_model(seed=1), profile)
    resumed.load(tmp_path, state)
    assert [step(resumed, seed) for seed in (1, 2)] == [step(straight, seed) for seed in (1, 2)]
