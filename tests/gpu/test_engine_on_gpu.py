"""Recorded decoding on a CUDA device. Left out unless asked for (`scripts/gpu_check.sh`)."""

from __future__ import annotations

import pytest
import torch
from tiny_models import DENSE, FAMILIES, MOE, peaked_model

from nmoe.engine.api import Request
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.model.config import ModelConfig
from nmoe.model.device import CudaRecorder
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.precision import cast
from nmoe.types import Precision, Sample, Sampling

pytestmark = pytest.mark.gpu


ENGINE_MODELS = {
    "dense": DENSE | {"head_dim": 16},
    "moe": MOE | {"head_dim": 16},
    "windows": DENSE | {"head_dim": 16, "windows": (0, 8)},
    "gpt_oss": FAMILIES["gpt_oss"],
    **{name: FAMILIES[name] for name in ("deepseek_v3", "glm4_moe", "gemma3_text", "qwen3_next")},
}


def sampled(engine: LLMEngine) -> list[Sample]:
    shapes = [(5, 3, 40), (17, 9, 24), (33, 2, 16), (1, 1, 60)]
    groups = [
        engine.add(Request(tuple(range(3, 3 + length)), n, Sampling(new, seed=n), f"request {n}"))
        for length, n, new in shapes
    ]
    while not engine.idle:
        engine.step()
    return [sample for group in groups for sample in group.samples if sample is not None]


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_recorded_decoding_agrees_with_the_learner(name: str, precision: Precision) -> None:
    model = cast(peaked_model(ModelConfig(**ENGINE_MODELS[name])), getattr(torch, precision)).to("cuda")
    engine = LLMEngine(model, 12)
    assert engine.runner.graphs is not None
    recorded = not model.config.experts or precision == "bfloat16"
    assert isinstance(engine.runner.graphs.record, CudaRecorder) == recorded
    samples = sampled(engine)
    assert len(samples) == 15
    prompts = [5] * 3 + [17] * 9 + [33] * 2 + [1]
    differences = []
    with torch.no_grad():
        for sample, prompt in zip(samples, prompts, strict=True):
            ids = torch.tensor([*range(3, 3 + prompt), *sample.token_ids], device="cuda")
            replay = None if sample.routes is None else torch.from_numpy(sample.routes).cuda()
            attend = PackedAttention([len(ids) - 1], ids.device)
            states = model(ids[:-1], torch.arange(len(ids) - 1, device="cuda"), attend, RouterTrace(replay=replay))
            logprobs, _ = head_logprobs(states[prompt - 1 :], model.head_weight, ids[prompt:])
            differences.append(logprobs.cpu() - torch.tensor(sample.logprobs))
    difference = torch.cat(differences)
    if precision == "float32":
        assert difference.abs().max() < 1e-3
        assert difference.abs().mean() < 1e-5
    else:
        # These models are tiny and peaked, and amplify rounding more than trained ones.
        assert (difference.exp() - 1 - difference).mean() < 5e-3


def test_new_weights_are_read_where_they_lie() -> None:
    model = cast(peaked_model(ModelConfig(**ENGINE_MODELS["dense"])), torch.bfloat16).to("cuda")
    engine = LLMEngine(model, 16)
    before = sampled(engine)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.o_proj.weight.mul_(-1)
    engine.commit(1)
    after, fresh = sampled(engine), sampled(LLMEngine(model, 16))
    assert [s.token_ids for s in after] == [s.token_ids for s in fresh]
    assert [s.token_ids for s in after] != [s.token_ids for s in before]


@pytest.mark.parametrize("name", ["dense", "moe", "gpt_oss"])
def test_exact_numerics_have_the_learner_s_bits(name: str) -> None:
    model = peaked_model(ModelConfig(**ENGINE_MODELS[name])).to("cuda").set_numerics("exact")
    engine = LLMEngine(model, 12)
    assert engine.runner.graphs is None  # the kernels that it would record depend on the batch
    prompts = [5] * 3 + [17] * 9 + [33] * 2 + [1]
    with torch.no_grad():
        for sample, prompt in zip(sampled(engine), prompts, strict=True):
            ids = torch.tensor([*range(3, 3 + prompt), *sample.token_ids], device="cuda")
            attend = PackedAttention([len(ids) - 1], ids.device, exact=True)
            states = model(ids[:-1], torch.arange(len(ids) - 1, device="cuda"), attend, RouterTrace())
            logprobs, _ = head_logprobs(states[prompt - 1 :], model.head_weight, ids[prompt:], exact=True)
            assert logprobs.tolist() == sample.logprobs


def test_the_cache_takes_its_share_of_what_is_free() -> None:
    model = cast(peaked_model(ModelConfig(**ENGINE_MODELS["dense"])), torch.bfloat16).to("cuda")
    free = torch.cuda.mem_get_info()[0]
    engine = LLMEngine(model.requires_grad_(False), 10**7)
    held = engine.cache.attention.keys.nbytes + engine.cache.attention.values.nbytes
    assert 0.8 * free < held < 0.87 * free
