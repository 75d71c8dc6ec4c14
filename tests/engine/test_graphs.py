"""Decode by recorded steps, on CPU, where a recording is a call: padding, sizes, buffers, and the engine on top."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nmoe.engine.api import Request
from nmoe.engine.native.attend import DecodeAttention
from nmoe.engine.native.cache import BLOCK_TOKENS, PagedCache
from nmoe.engine.native.graphs import DecodeGraphs, run_plainly
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.model.config import DeltaNet
from nmoe.model.moe import RouterTrace
from nmoe.model.transformer import Transformer

MakeModel = Callable[..., Transformer]
MakeRequest = Callable[..., Request]

KINDS: dict[str, dict[str, Any]] = {"moe": {}, "dense": {"experts": 0}, "windows": {"windows": (0, 5), "sinks": True}}
KINDS["recurrent"] = {
    "recurrent_layers": (1,),
    "delta": DeltaNet(key_heads=2, value_heads=4, key_dim=12, value_dim=10, conv_tokens=4),
}
SEATS = 4


class Recorder:
    """Counts recordings and replays; runs a step twice to record it, as a GPU does."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        run()
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return replay


def filled_cache(model: Transformer, blocks: int) -> PagedCache:
    cache = PagedCache(model.config, blocks, SEATS + 1, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(1)
    states = [] if cache.states is None else [cache.states.inputs, cache.states.memories]
    for tensor in (cache.attention.keys, cache.attention.values, *states):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_step_equals_the_gathered_one_and_writes_nowhere_else(tiny_model: MakeModel, kind: str) -> None:
    model = tiny_model(**KINDS[kind])
    scratch = 9
    ours, theirs = filled_cache(model, 10), filled_cache(model, 10)
    recorder = Recorder()
    graphs = DecodeGraphs(model, ours, (scratch, SEATS), recorder)
    # Sizes 3 (of 4), 4 and again 3; rows in blocks of no order, among them a first token.
    steps = [
        ([20, 0, 33], [[3, 7, 0], [5, 0, 0], [1, 8, 2]]),
        ([21, 1, 34, 15], [[3, 7, 0], [5, 0, 0], [1, 8, 2], [6, 0, 0]]),
        ([22, 2, 16], [[3, 7], [5, 0], [6, 4]]),
    ]
    for positions, table in steps:
        tokens = torch.tensor([4, 9, 2, 7])[: len(positions)]
        positions_B, table_BM = np.array(positions), np.array(table)
        state_slots_B = np.array([2, 0, 3, 1])[: len(positions)]
        states, routes = graphs.run(tokens, positions_B, table_BM, state_slots_B)
        attend, trace = DecodeAttention(theirs, positions_B, table_BM, state_slots_B), RouterTrace()
        expected = model(tokens, torch.tensor(positions), attend, trace)
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
        assert (routes is None) == (not trace.chosen_TK)
        assert routes is None or torch.equal(routes, trace.routes())
        for mine, other in (
            (ours.attention.keys, theirs.attention.keys),
            (ours.attention.values, theirs.attention.values),
        ):
            torch.testing.assert_close(mine[:, :scratch], other[:, :scratch], rtol=1e-4, atol=1e-5)
        if ours.states is not None and theirs.states is not None:
            mine, other = ours.states.memories, theirs.states.memories
            torch.testing.assert_close(mine[:, :SEATS], other[:, :SEATS], rtol=1e-4, atol=1e-5)
    assert (recorder.recordings, recorder.replays) == (1, 3)


@torch.inference_mode()
def test_sizes_double_and_new_weights_need_no_new_recording(tiny_model: MakeModel) -> None:
    model = tiny_model()
    recorder = Recorder()
    graphs = DecodeGraphs(model, filled_cache(model, 10), (9, SEATS), recorder)

    def step(rows: int, blocks: int) -> torch.Tensor:
        firsts = np.zeros(rows, dtype=np.int64)
        states, _ = graphs.run(torch.arange(rows), firsts, np.zeros((rows, blocks), dtype=np.int64), firsts)
        return states.clone()

    before = step(1, 1)
    for rows, blocks, recordings in ((1, 32, 1), (2, 1, 2), (3, 1, 3), (4, 32, 3), (4, 33, 4), (3, 64, 4)):
        step(rows, blocks)
        assert recorder.recordings == recordings
    model.embedding.weight.mul_(-1)
    assert not torch.allclose(step(1, 1), before)
    assert recorder.recordings == 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_samples_the_same(tiny_model: MakeModel, request_of: MakeRequest, kind: str) -> None:
    model = tiny_model(**KINDS[kind])
    results = []
    for recorded in (False, True):
        engine = LLMEngine(model, 4)
        if recorded:
            scratch = engine.scheduler.blocks.take(1)[0], engine.scheduler.blocks.take_state_slot()
            engine.runner.graphs = DecodeGraphs(model, engine.cache, scratch, run_plainly)
        groups = [
            engine.add(request_of(*shape)) for shape in [("a", 5, 3, 20), ("b", 1, 2, 30), ("c", BLOCK_TOKENS, 2, 9)]
        ]
        while not engine.idle:
            engine.step()
        results.append([sample for group in groups for sample in group.samples])
    for plain, graph in zip(*results, strict=True):
        assert plain.token_ids == graph.token_ids
        assert graph.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
        assert (plain.routes is None) == (graph.routes is None)
        assert plain.routes is None or (plain.routes == graph.routes).all()
