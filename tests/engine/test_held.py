"""Sequences that are held for new weights: they get the very tokens, log-probabilities and routes of an engine whose weights were
changed while it sampled."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch

from nmoe.engine.api import Request
from nmoe.engine.native.cache import bytes_per_block
from nmoe.engine.native.held import HeldEngine, OtherTokensError
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.model.transformer import Transformer
from nmoe.types import Sample

MakeModel = Callable[..., Transformer]
MakeRequest = Callable[..., Request]
Weights = dict[str, torch.Tensor]
Recorded = dict[str, dict[int, list[tuple[int, int]]]]


def versions_of(model: Transformer, count: int) -> list[Weights]:
    """Returns weights that differ enough for every one to sample tokens of its own."""
    found = [copy.deepcopy(model.state_dict())]
    for seed in range(1, count):
        generator = torch.Generator().manual_seed(seed)
        found.append(
            {
                name: one * (1 + 0.2 * torch.randn(one.shape, generator=generator)) if one.is_floating_point() else one
                for name, one in found[-1].items()
            }
        )
    return found


def lived(model: Transformer, weights: list[Weights], requests: list[Request], seed: int, blocks: int) -> list[Any]:
    """Samples the requests as a server does, which come at any time, and so do the weights."""
    chance, rows = random.Random(seed), 3
    engine = LLMEngine(model, rows, bytes_per_block(model.config, torch.float32) * blocks, prefill_tokens=24)
    groups, left, version = [], [*requests], 0
    while left or not engine.idle:
        if left and chance.random() < 0.2:
            groups.append(engine.add(left.pop(0)))
        if version + 1 < len(weights) and chance.random() < 0.06 and not engine.recomputing:
            version += 1
            model.load_state_dict(weights[version])
            engine.commit(version, recompute=True)
        engine.step()
    return [group.samples for group in groups]


def spans_of(sample: Sample) -> list[tuple[int, int]]:
    return [(version, len([*same])) for version, same in groupby(sample.versions)]


def held(
    model: Transformer, weights: list[Weights], requests: list[Request], recorded: Recorded, rows: int = 5
) -> list[list[Sample]]:
    """Samples the requests all at once, each version of the weights as far as the record says."""
    with HeldEngine(model, rows, 0, recorded.get) as engine:
        tasks: list[asyncio.Task[list[Sample]]] = []

        async def start() -> None:
            tasks.extend(asyncio.ensure_future(engine.generate(request)) for request in requests)

        async def reached(version: int) -> None:
            due = {
                (name, index): sum(count for of, count in spans if of <= version)
                for name, samples in recorded.items()
                for index, spans in samples.items()
            }
            while due := await engine.missing(due):
                await asyncio.sleep(0)

        async def ended() -> list[list[Sample]]:
            return await asyncio.gather(*tasks)

        for version, one in enumerate(weights):
            model.load_state_dict(one)
            engine.run(engine.update_weights(model, version))
            if not version:
                engine.run(start())
            engine.run(reached(version))
        return engine.run(ended())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["moe", "dense", "cut"])
def test_held_sequences_get_the_bits_of_a_server(
    tiny_model: MakeModel, request_of: MakeRequest, kind: str, seed: int
) -> None:
    """With preemptions, prompts in parts, and a group whose samples begin by several versions."""
    model = tiny_model(**({"experts": 0} if kind == "dense" else {})).set_numerics("exact")
    cut: dict[str, Any] = {"top_k": 20, "temperature": 0.8} if kind == "cut" else {}
    shapes = [("a", 20, 5, 24), ("b", 1, 3, 30), ("c", 17, 4, 9), ("d", 30, 2, 24), ("e", 9, 3, 20)]
    requests = [request_of(*shape, **cut) for shape in shapes]
    weights = versions_of(model, 5)
    server = lived(model, weights, requests, seed, blocks=11)
    recorded: Recorded = {
        request.request_id: {index: spans_of(sample) for index, sample in enumerate(samples)}
        for request, samples in zip(requests, server, strict=True)
    }
    replayed = held(model, weights, requests, recorded)
    spans = [one for samples in recorded.values() for one in samples.values()]
    assert max(map(len, spans)) > 1
    assert len({version for one in spans for version, _ in one}) > 2
    for before, now in zip(server, replayed, strict=True):
        for old, new in zip(before, now, strict=True):
            assert (new.token_ids, new.versions, new.kept_ids) == (old.token_ids, old.versions, old.kept_ids)
            assert new.logprobs == old.logprobs  # bit for bit
            assert new.finish_reason == old.finish_reason
            assert (old.routes is None) == (kind == "dense")
            if old.routes is not None:
                assert (new.routes == old.routes).all()


def test_a_record_of_other_tokens_is_named(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model, request = tiny_model().set_numerics("exact"), request_of("a", 5, 1, 8)
    for spans, said in (([(0, 3), (1, 9)], "has 8 tokens where 12 were"), ([(0, 5)], "has 8 tokens where 5 were")):
        with pytest.raises(OtherTokensError, match=said):
            held(model, versions_of(model, 2), [request], {"a": {0: spans}})
    with pytest.raises(OtherTokensError, match="has no sample 0"):
        held(model, versions_of(model, 1), [request], {"a": {}})


def test_a_request_without_a_record_is_sampled_by_the_present_weights(
    tiny_model: MakeModel, request_of: MakeRequest
) -> None:
    model, request = tiny_model().set_numerics("exact"), request_of("a", 5, 2, 8)
    weights = versions_of(model, 2)
    model.load_state_dict(weights[1])
    with HeldEngine(model, 4, 0, {"lost": {0: []}}.get) as engine:
        engine.run(engine.update_weights(model, 1))
        samples = engine.run(engine.generate(request))
        (lost,) = engine.run(engine.generate(request_of("lost", 5, 1, 8)))
    fresh = LLMEngine(model, 4)
    group = fresh.add(request)
    while not fresh.idle:
        fresh.step()
    assert [one.token_ids for one in samples] == [one.token_ids for one in group.samples if one is not None]
    assert {version for one in samples for version in one.versions} == {1}
    assert (lost.token_ids, lost.finish_reason) == ([], "abort")


def test_weights_that_have_gone_are_asked_for_in_vain(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    with HeldEngine(model, 4, 0, {"a": {0: [(0, 8)]}}.get) as engine:
        engine.run(engine.update_weights(model, 1))
        with pytest.raises(OtherTokensError, match="sampled by version 0 of the weights, and asked for at 1"):
            engine.run(engine.generate(request_of("a", 5, 1, 8)))
