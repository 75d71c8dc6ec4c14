"""Engine and learner agree on the log-probabilities of sampled tokens, also with experts in a profile."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_family

from nmoe.config.tables.model import ExpertProfile, OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import clip, cross_entropy
from nmoe.learner.passes import batch_logprobs
from nmoe.model.config import Numerics
from nmoe.model.expert_profile import dequantised
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.ops.cpu import library, operations
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.rl.experience import policy_batch
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn

MakeModel = Callable[..., Transformer]
MakeRequest = Callable[..., Request]


def trajectories_of(answers: Iterable[tuple[Request, Sample | None]]) -> list[Trajectory]:
    problem, grade = Problem("p/0", "reverse", "", "", "p"), Grade(0.0, {}, "ok", {}, None)
    return [
        Trajectory(problem, 0, r.prompt_ids, (Turn((), sample),), grade, r.sampling)
        for r, sample in answers
        if sample is not None
    ]


@pytest.mark.parametrize("changes", [{}, {"experts": 0}], ids=["moe", "dense"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_k": 6}, {"temperature": 1.3}],
    ids=str,
)
def test_learner_recomputes_the_engines_logprobs(
    tiny_model: MakeModel, request_of: MakeRequest, sampling: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = tiny_model(**changes)
    engine = LLMEngine(model, 5)
    # Stop ids that the samples meet at some place or other.
    requests = [request_of(n, 3 + 7 * i, 4, 8 + 9 * i, stop_ids=(4, 30), **sampling) for i, n in enumerate("abc")]
    groups = [engine.add(request) for request in requests]
    while not engine.idle:
        engine.step()
    trajectories = trajectories_of((group.request, sample) for group in groups for sample in group.samples)
    assert {reason for t in trajectories for reason in t.finish_reasons} == {"stop", "length"}
    batch = policy_batch(trajectories, torch.randn(12, generator=torch.Generator().manual_seed(0)), "token", 35)
    assert (batch.kept_TM is not None) == ("top_p" in sampling or "top_k" in sampling)
    temperature = sampling.get("temperature", 1.0)
    learner = Learner(model, OptimizerSection(learning_rate=1e-3), 10, 100, temperature)
    emitted = torch.tensor([logprob for t in trajectories for logprob in t.logprobs])
    mismatch = (learner.logprobs(batch).result() - emitted).abs()
    assert mismatch.mean() <= 1e-6 / min(1.0, temperature)
    assert mismatch.max() <= 1e-4
    result = learner.forward_backward(batch, clip(0.2, 0.2)).result()
    assert result.tokens["log_ratio"].abs().mean() <= 1e-6 / min(1.0, temperature)
    assert result.tokens["log_ratio"].abs().max() <= 1e-4
    assert result.tokens["clipped"].sum() == 0
    if result.routing is not None:
        assert batch.routes_TYK is not None
        assert result.routing.flips == 0
        assert int(result.routing.load_YE.sum()) == batch.routes_TYK.numel()


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_at_the_vocabulary_of_a_released_model(
    request_of: MakeRequest, numerics: Numerics, sampling: dict[str, Any]
) -> None:
    """Qwen3's 151,936 tokens, where sums over the vocabulary are long and kernels of their own compute them."""
    model = tiny_family("qwen3", vocab_size=151_936).set_numerics(numerics)
    engine = LLMEngine(model, 6)
    requests = [request_of(f"r{i}", 3 + 9 * i, 2, 20, **sampling) for i in range(4)]
    groups = [engine.add(request) for request in requests]
    while not engine.idle:
        engine.step()
    trajectories = trajectories_of((group.request, sample) for group in groups for sample in group.samples)
    assert max(token for t in trajectories for token in t.token_ids) > 48
    emitted = torch.tensor([logprob for t in trajectories for logprob in t.logprobs])
    batch = policy_batch(trajectories, torch.ones(len(trajectories)), "token", 20)
    difference = (batch_logprobs(model, batch, 100, sampling.get("temperature", 1.0)) - emitted).abs()
    if numerics == "exact":
        assert difference.max() == 0
    else:
        assert difference.mean() <= 1e-6 / min(1.0, sampling.get("temperature", 1.0))
        assert difference.max() <= 1e-4


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("prefill_tokens", [2048, 500])
def test_after_a_long_prompt(
    request_of: MakeRequest, family: str, prefill_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,500 tokens, at once and in pieces: long enough for the kernel that attends to whole blocks of keys."""
    model, calls, attend = tiny_family(family, context_tokens=2048), [], operations.causal_attention
    monkeypatch.setattr(operations, "causal_attention", lambda *given: (calls.append(1), attend(*given))[1])
    engine = LLMEngine(model, 2, prefill_tokens=prefill_tokens)
    group = engine.add(request_of("long", 1500, 2, 20))
    while not engine.idle:
        engine.step()
    assert calls or library.library() is None
    trajectories = trajectories_of((group.request, sample) for sample in group.samples)
    emitted = torch.tensor([logprob for t in trajectories for logprob in t.logprobs])
    batch = policy_batch(trajectories, torch.ones(2), "token", 20)
    difference = (batch_logprobs(model, batch, 4096, 1.0) - emitted).abs()
    # Of 40 tokens, whose mean lies at 0.56 to 0.83e-6 by the processor's kernels; the contract is of all tokens of a run.
    assert difference.mean() <= 2e-6
    assert difference.max() <= 1e-4


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_an_adapter_on_what_expands_latents_takes_part(request_of: MakeRequest, numerics: Numerics) -> None:
    """Decoding without keys reads the weight of that projection itself, and the adapter's update with it."""
    model = tiny_family("deepseek_v3").set_numerics(numerics).requires_grad_(False)
    requests = [request_of(f"r{i}", 3 + 9 * i, 2, 12 + 5 * i) for i in range(4)]

    def emitted() -> Iterable[tuple[Request, Sample | None]]:
        engine = LLMEngine(model, 5)
        groups = [engine.add(request) for request in requests]
        while not engine.idle:
            engine.step()
        return [(group.request, sample) for group in groups for sample in group.samples]

    plain = [sample.token_ids for _, sample in emitted() if sample is not None]
    lora = Lora(model, LoraSettings(4, 6.0), choose(model, ("kv_b_proj",)), "base", "f").initialize(1)
    for site in lora.sites:
        with torch.no_grad():
            b = lora.part(site)[1]
            b.copy_(0.3 * torch.randn(b.shape, generator=torch.Generator().manual_seed(2)))
    trajectories = trajectories_of(emitted())
    assert [list(t.turns[0].sample.token_ids) for t in trajectories] != plain
    batch = policy_batch(trajectories, torch.zeros(len(trajectories)), "token", 35)
    logprobs = torch.tensor([logprob for t in trajectories for logprob in t.logprobs])
    mismatch = (batch_logprobs(model, batch, 100, 1.0) - logprobs).abs()
    # Of few tokens, whose mean lies at 0.70 to 0.84e-6 by the processor's kernels; the contract is of all tokens of a run.
    assert mismatch.mean() <= 2e-6
    assert mismatch.max() <= 1e-4


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="what oneDNN gives of a row's bits, others may not"
)
@pytest.mark.parametrize("experts", [6, 0], ids=["moe", "dense"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
def test_exact_numerics_agree_to_the_bit(
    tiny_model: MakeModel, request_of: MakeRequest, experts: int, sampling: dict[str, Any]
) -> None:
    model = tiny_model(experts=experts).set_numerics("exact")
    # Ragged prompts and limits: batches shrink to a single row at the end, the smallest products there are.
    requests = [request_of(f"r{i}", 1 + i % 5, 3, 3 + 2 * i, **sampling) for i in range(6)]
    engine = NativeEngine(model, 8)

    async def everyone() -> list[list[Sample]]:
        return await asyncio.gather(*map(engine.generate, requests))

    answers = zip(requests, engine.run(everyone()), strict=True)
    trajectories = trajectories_of((request, sample) for request, samples in answers for sample in samples)
    batch = policy_batch(trajectories, torch.zeros(len(trajectories)), "token", 35)
    recomputed = batch_logprobs(model, batch.without_routes(), 100, sampling.get("temperature", 1.0))
    emitted = torch.tensor([logprob for t in trajectories for logprob in t.logprobs])
    assert torch.equal(recomputed, emitted)
    assert emitted.std() > 0.1


@pytest.mark.parametrize(
    "changes", [{}, {"experts": 0}, {"dense_layers": (0, 1)}], ids=["moe", "dense", "moe without such a layer"]
)
def test_turns_agree_with_one_pass_over_all_of_them(
    tiny_model: MakeModel, request_of: MakeRequest, changes: dict[str, Any]
) -> None:
    """Three turns with given tokens between them, the later ones from the prefix cache: the learner sees one sequence."""
    model = tiny_model(**changes)
    engine = NativeEngine(model, 4)
    problem, grade = Problem("p/0", "reverse", "", "", "p"), Grade(0.0, {}, "ok", {}, None)

    async def turns_of(name: str) -> Trajectory:
        first = request_of(name, 9, 1, 12)
        ids, turns = first.prompt_ids, list[Turn]()
        for place in range(3):
            given = (5, 6, 7, place) if place else ()
            ids = (*ids, *given)
            sampling = replace(first.sampling, seed=first.sampling.seed + place)
            (sample,) = await engine.generate(Request(ids, 1, sampling, f"{name}/{place}"))
            turns.append(Turn(given, sample))
            ids = (*ids, *sample.token_ids)
        return Trajectory(problem, 0, first.prompt_ids, tuple(turns), grade, first.sampling)

    async def all_of() -> list[Trajectory]:
        return await asyncio.gather(*(turns_of(name) for name in "abcde"))

    trajectories = engine.run(all_of())
    assert engine.stats().prefix_hit_tokens > 0
    batch = policy_batch(trajectories, torch.zeros(5), "token", 40)
    assert batch.lengths == (9 + 3 * 12 + 2 * 4 - 1,) * 5
    sampled = [one for t in trajectories for one, by_policy in zip(t.logprobs, t.mask, strict=True) if by_policy]
    learner = Learner(model, OptimizerSection(learning_rate=1e-3), 10, 100, 1.0)
    mismatch = (learner.logprobs(batch).result() - torch.tensor(sampled)).abs()
    assert len(mismatch) == 5 * 36
    assert mismatch.mean() <= 1e-6
    assert mismatch.max() <= 1e-4


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
