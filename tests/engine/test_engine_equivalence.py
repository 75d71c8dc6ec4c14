"""A request gives the same tokens and log-probabilities whatever happens around it, for every family: in any batch, with its
prompt computed in parts, after a prefix hit, after it lost its cache to another, and recomputed by the learner."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_family

from nmoe.engine.api import EngineStats, Request
from nmoe.engine.native.cache import bytes_per_block, bytes_per_state_slot
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.learner.passes import batch_logprobs
from nmoe.model.config import Numerics
from nmoe.model.transformer import Transformer
from nmoe.rl.experience import policy_batch
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn

Answers = list[tuple[Request, Sample]]


def requests() -> list[Request]:
    """Prompts from 1 to 40 tokens, three of them with a common beginning of 33."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(48, (33,), generator=generator).tolist()
    prompts = [torch.randint(48, (n,), generator=generator).tolist() for n in (1, 17, 40, 2, 9)]
    prompts += [common, [*common, 7], [*common[:20], 9, 9, 9]]
    shapes = [(3, 30), (4, 20), (1, 24), (2, 1), (3, 17), (2, 31), (2, 12), (1, 20)]
    return [
        Request(tuple(prompt), n, Sampling(tokens, seed=i), f"r{i}")
        for i, (prompt, (n, tokens)) in enumerate(zip(prompts, shapes, strict=True))
    ]


def answers(engine: LLMEngine, asked: Iterable[Request]) -> Answers:
    groups = [engine.add(request) for request in asked]
    while not engine.idle:
        engine.step()
    return [(group.request, sample) for group in groups for sample in group.samples if sample is not None]


def compare(ours: Answers, theirs: Answers, exact: bool) -> None:
    assert [(request, sample.token_ids) for request, sample in ours] == [(r, sample.token_ids) for r, sample in theirs]
    logprobs = [torch.tensor([p for _, sample in side for p in sample.logprobs]) for side in (ours, theirs)]
    check(*logprobs, exact)
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        if other.routes is not None:
            assert mine.routes is not None
            assert (mine.routes == other.routes).all()


def check(ours: torch.Tensor, theirs: torch.Tensor, exact: bool) -> None:
    assert len(ours) == len(theirs) > 300
    difference = (ours - theirs).abs()
    if exact:
        assert difference.max() == 0
    else:
        assert difference.mean() <= 1e-6
        assert difference.max() <= 1e-4


def exact_where_it_can_be(numerics: Numerics) -> bool:
    return numerics == "exact" and torch.backends.mkldnn.is_available()


def in_a_batch(model: Transformer) -> tuple[Answers, EngineStats]:
    engine = LLMEngine(model, 32)
    return answers(engine, requests()), engine.stats()


def in_few_rows(model: Transformer) -> tuple[Answers, EngineStats]:
    engine = LLMEngine(model, 5)
    return answers(engine, requests()), engine.stats()


def in_parts(model: Transformer) -> tuple[Answers, EngineStats]:
    engine = LLMEngine(model, 7, prefill_tokens=6)
    found = answers(engine, requests())
    assert engine.stats().decode_steps > 30
    return found, engine.stats()


def after_a_prefix_hit(model: Transformer) -> tuple[Answers, EngineStats]:
    engine = LLMEngine(model, 32)
    answers(engine, requests())
    assert engine.stats().prefix_hit_tokens == 0  # all were computed at once
    found = answers(engine, requests())
    # Whole blocks of 16, and the last token always computed: 17, 40, 33, 34 and 23 tokens long. States are not kept.
    hits = 0 if model.config.recurrent_layers else 16 + 32 + 32 + 32 + 16
    assert engine.stats().prefix_hit_tokens == hits
    return found, engine.stats()


def in_little_memory(model: Transformer) -> tuple[Answers, EngineStats]:
    kind = model.config, model.embedding.weight.dtype
    engine = LLMEngine(model, 32, cache_bytes=7 * bytes_per_block(*kind) + 33 * bytes_per_state_slot(*kind))
    found = answers(engine, requests())
    assert engine.stats().preemptions > 3
    return found, engine.stats()


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [in_a_batch, in_few_rows, in_parts, after_a_prefix_hit, in_little_memory])
def test_whatever_happens_around_it(
    alone: Callable[[str, Numerics], tuple[Transformer, Answers]], family: str, numerics: Numerics, way: Any
) -> None:
    model, expected = alone(family, numerics)
    found, stats = way(model)
    compare(found, expected, exact_where_it_can_be(numerics))
    assert stats.cache_use == 0  # everything was given back
    assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_by_the_learner(
    alone: Callable[[str, Numerics], tuple[Transformer, Answers]], family: str, numerics: Numerics
) -> None:
    model, expected = alone(family, numerics)
    problem, grade = Problem("p/0", "reverse", "", "", "p"), Grade(0.0, {}, "ok", {}, None)
    trajectories = [
        Trajectory(problem, i, request.prompt_ids, (Turn((), sample),), grade, request.sampling)
        for i, (request, sample) in enumerate(expected)
    ]
    batch = policy_batch(trajectories, torch.ones(len(trajectories)), "token", 35)
    emitted = torch.tensor([p for _, sample in expected for p in sample.logprobs])
    for routes in (batch, batch.without_routes()):
        check(batch_logprobs(model, routes, 100, 1.0), emitted, exact_where_it_can_be(numerics))


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_logprobs_of_what_was_sampled(
    alone: Callable[[str, Numerics], tuple[Transformer, Answers]], family: str, numerics: Numerics
) -> None:
    model, expected = alone(family, numerics)
    engine = LLMEngine(model, 3, prefill_tokens=13)
    groups = [
        engine.add_scoring([*request.prompt_ids, *s.token_ids], 1.0, f"{i}") for i, (request, s) in enumerate(expected)
    ]
    while not engine.idle:
        engine.step()
    scores: list[float] = []
    for group, (request, sample) in zip(groups, expected, strict=True):
        assert group.scores is not None
        assert len(group.scores) == len(request.prompt_ids) + len(sample.token_ids) - 1
        scores += group.scores[len(request.prompt_ids) - 1 :]
    emitted = torch.tensor([p for _, sample in expected for p in sample.logprobs])
    check(torch.tensor(scores), emitted, exact_where_it_can_be(numerics))


@pytest.fixture(scope="module")
def alone() -> Callable[[str, Numerics], tuple[Transformer, Answers]]:
    """A family's model and the answers of every request on its own."""
    known: dict[tuple[str, Numerics], tuple[Transformer, Answers]] = {}

    def of(family: str, numerics: Numerics) -> tuple[Transformer, Answers]:
        if (family, numerics) not in known:
            model = tiny_family(family).set_numerics(numerics)
            known[family, numerics] = model, [a for r in requests() for a in answers(LLMEngine(model, r.samples), [r])]
        return known[family, numerics]

    return of
