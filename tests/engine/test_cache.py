"""The paged cache, its block manager with shared prefixes, and the state slots of recurrent layers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_family
from torch import Tensor

from nmoe.engine.api import Request
from nmoe.engine.native.attend import DecodeAttention, Piece, PrefillAttention
from nmoe.engine.native.block_manager import BlockManager
from nmoe.engine.native.cache import (
    BLOCK_TOKENS,
    CacheSize,
    PagedCache,
    bytes_per_block,
    bytes_per_state_slot,
    cache_size,
)
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.errors import DivergenceError, UserError
from nmoe.model.config import DeltaNet, LatentAttention, ModelConfig
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.recurrence import RecurrentState
from nmoe.model.transformer import Transformer

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4}
CONFIG = ModelConfig(**SHAPE, context_tokens=128, experts=4, experts_per_token=2, expert_width=4)
TABLES = [[9, 2, 7], [0], [5, 3], [1, 8, 6]]  # blocks of four sequences, in no order
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive(layer: AttentionLayer, q_HC: Tensor, k_LJC: Tensor, v_LJC: Tensor) -> Tensor:
    """One query, whose own key is the last, head by head."""
    seen = slice(max(0, len(k_LJC) - layer.window) if layer.window else 0, len(k_LJC))
    rows = []
    for h in range(4):
        weights = (k_LJC[seen, h // 2] @ q_HC[h] * layer.scale).exp()
        total = weights.sum() + (0 if layer.sinks_H is None else layer.sinks_H[h].exp())
        rows.append(weights / total @ v_LJC[seen, h // 2])
    return torch.stack(rows)


LAYERS = [
    AttentionLayer(1, 0.5),
    AttentionLayer(1, 0.7, window=5),
    AttentionLayer(1, 0.5, window=20, sinks_H=SINKS),
    AttentionLayer(1, 0.5, sinks_H=SINKS),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("stored", [[40, 10, 25, 47], [33, 15, 16, 40], [16, 0, 31, 1]], ids=str)
def test_prefill_in_two_parts_and_decode(layer: AttentionLayer, stored: list[int]) -> None:
    """`stored` positions go through prefill, the second half of them as a later piece; then one more is decoded."""
    cache = PagedCache(CONFIG, 10, 1, CPU, torch.float32)
    cache.attention.keys.fill_(1e4)  # what lies beyond must not count
    cache.attention.values.fill_(-1e4)
    lengths = [n + 1 for n in stored]
    q, k, v = ([draw(n, heads, 4, seed=n + heads) for n in lengths] for heads in (4, 2, 2))
    v = [-x for x in v]
    parts = [[(0, n // 2) for n in stored], [(n // 2, n) for n in stored]]
    for part in parts:
        chosen = [(i, start, stop) for i, (start, stop) in enumerate(part) if stop > start]
        chosen.sort(key=lambda entry: entry[1] > 0)
        pieces = [Piece(TABLES[i], i, start, stop) for i, start, stop in chosen]
        attend = PrefillAttention(cache, pieces, exact=False)
        out = attend(layer, *(torch.cat([x[i][a:b] for i, a, b in chosen]) for x in (q, k, v)))
        at = 0
        for i, start, stop in chosen:
            for t in range(start, stop):
                expected = naive(layer, q[i][t], k[i][: t + 1], v[i][: t + 1])
                torch.testing.assert_close(out[at], expected, rtol=1e-5, atol=1e-5)
                at += 1
    table = np.zeros((4, 3), dtype=np.int64)
    for row, blocks in enumerate(TABLES):
        table[row, : len(blocks)] = blocks
    decode = DecodeAttention(cache, np.array(stored), table, np.arange(4))
    out = decode(layer, *(torch.stack([x[i][n] for i, n in enumerate(stored)]) for x in (q, k, v)))
    for i in range(4):
        torch.testing.assert_close(out[i], naive(layer, q[i][-1], k[i], v[i]), rtol=1e-5, atol=1e-5)
    assert (cache.attention.keys[0] == 1e4).all()  # the other layer's
    assert (cache.attention.keys[1, 4] == 1e4).all()  # nobody's block


def test_whole_blocks_are_copied_with_their_routes() -> None:
    cache = PagedCache(CONFIG, 4, 1, CPU, torch.float32)
    for tensor in (cache.attention.keys, cache.attention.values):
        tensor.copy_(draw(*tensor.shape))
    assert cache.routes is not None
    cache.routes.picks.copy_(torch.randint(4, cache.routes.picks.shape))
    keys, values, routes = cache.attention.keys.clone(), cache.attention.values.clone(), cache.routes.picks.clone()
    cache.copy([(2, 0), (2, 3)], [])
    for target, source in ((0, 2), (1, 1), (2, 2), (3, 2)):
        assert torch.equal(cache.attention.keys[:, target], keys[:, source])
        assert torch.equal(cache.attention.values[:, target], values[:, source])
        assert torch.equal(cache.routes.picks.view(4, 16, 2, 2)[target], routes.view(4, 16, 2, 2)[source])


def test_routes_are_read_as_they_were_written() -> None:
    cache = PagedCache(CONFIG, 4, 1, CPU, torch.float32)
    positions = np.arange(12, 20)
    blocks = np.where(positions < 16, 3, 1)
    picks = torch.arange(32, dtype=torch.int16).view(8, 2, 2)
    assert cache.routes is not None
    cache.routes.write(blocks, positions, picks)
    routes = cache.routes.read([3, 1], 20)
    assert routes.shape == (20, 2, 2)
    assert torch.equal(routes[12:], picks)
    assert (routes[:12] == 0).all()
    dense = PagedCache(ModelConfig(**SHAPE, context_tokens=16, intermediate_size=4), 2, 1, CPU, torch.float32)
    assert dense.routes is None
    dense.copy([(0, 1)], [])


def test_a_block_takes_what_its_tensors_take() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        cache = PagedCache(CONFIG, 3, 1, CPU, dtype)
        assert cache.routes is not None
        assert cache.attention.keys.dtype == dtype
        tensors = (cache.attention.keys, cache.attention.values, cache.routes.picks)
        assert 3 * bytes_per_block(CONFIG, dtype) == sum(tensor.nbytes for tensor in tensors)


RECURRENT = ModelConfig(
    **(SHAPE | {"layers": 3}),
    context_tokens=128,
    intermediate_size=4,
    recurrent_layers=(0, 2),
    delta=DeltaNet(key_heads=1, value_heads=2, key_dim=3, value_dim=5, conv_tokens=4),
)


def test_a_state_lies_in_its_state_slot_and_goes_with_a_copy() -> None:
    cache = PagedCache(RECURRENT, 2, 4, CPU, torch.float32)
    assert cache.states is not None
    assert not cache.shares_prefixes
    for tensor in (cache.states.inputs, cache.states.memories):
        tensor.fill_(torch.nan)  # of whoever sat there before
    state_slots = torch.tensor([3, 1])
    fresh = cache.states.read(2, state_slots, fresh=2)
    assert not fresh.inputs_SKW.any()
    assert not fresh.memory_SHCU.any()
    state = RecurrentState(draw(2, 3, 16), draw(2, 2, 3, 5))
    cache.states.write(2, state_slots, state)
    cache.copy([], [(3, 0)])
    found = cache.states.read(2, torch.tensor([1, 0, 3]))
    assert torch.equal(found.inputs_SKW, state.inputs_SKW[[1, 0, 0]])
    assert torch.equal(found.memory_SHCU, state.memory_SHCU[[1, 0, 0]])
    assert cache.states.read(0, state_slots).memory_SHCU.isnan().all()  # another layer's
    assert cache.states.read(2, torch.tensor([2])).memory_SHCU.isnan().all()  # another slot


def test_a_state_slot_takes_what_its_tensors_take_and_blocks_are_of_the_other_layers() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = PagedCache(RECURRENT, 3, 5, CPU, dtype)
        assert cache.states is not None
        assert cache.states.memories.dtype == torch.float32
        assert 5 * bytes_per_state_slot(RECURRENT, dtype) == cache.states.inputs.nbytes + cache.states.memories.nbytes
        assert cache.attention.keys.shape[0] == 1
        assert 3 * bytes_per_block(RECURRENT, dtype) == cache.attention.keys.nbytes + cache.attention.values.nbytes


def test_of_a_cache_state_slots_come_first() -> None:
    block, state_slot = bytes_per_block(RECURRENT, torch.float32), bytes_per_state_slot(RECURRENT, torch.float32)
    # Six sequences and a prompt; a byte short of another block.
    given = 7 * state_slot + 5 * block - 1
    assert cache_size(RECURRENT, torch.float32, 6, given, 0) == CacheSize(4, 7, 7 * state_slot + 4 * block)
    # 128 positions are eight blocks, and one is for a copy.
    assert cache_size(RECURRENT, torch.float32, 6, 0, 10**9) == CacheSize(54, 7, 7 * state_slot + 54 * block)
    with pytest.raises(
        UserError, match=rf"not even one block .*{block} bytes\) beside 7 sequences' states \({state_slot} bytes"
    ):
        cache_size(RECURRENT, torch.float32, 6, 7 * state_slot + block - 1, 0)


def test_of_latent_attention_latents_alone_are_stored() -> None:
    """DeepSeek-V3: 576 numbers a layer for each token, 70 KB in bf16, where expanded keys and values would be 5 MB."""
    latent = LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    config = ModelConfig(
        vocab_size=8,
        hidden_size=7168,
        layers=61,
        heads=128,
        kv_heads=128,
        head_dim=192,
        context_tokens=64,
        latent=latent,
        qk_norm=False,
        intermediate_size=8,
    )
    assert bytes_per_block(config, torch.bfloat16) == 16 * 61 * 576 * 2
    cache = PagedCache(config, 3, 1, CPU, torch.bfloat16)
    assert cache.attention.keys.nbytes + cache.attention.values.nbytes == 3 * bytes_per_block(config, torch.bfloat16)
    cache.attention.keys.copy_(draw(*cache.attention.keys.shape))
    cache.copy([(2, 0)], [])
    assert torch.equal(cache.attention.keys[:, 0], cache.attention.keys[:, 2])
    cache.clear(2)
    assert not cache.attention.keys[:, :2].any()
    assert cache.attention.keys[:, 2].all(-1).any()


MakeRequest = Callable[..., Request]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_family("qwen3_next").set_numerics("exact")


def tokens(engine: LLMEngine, requests: list[Request]) -> list[list[list[int]]]:
    groups = [engine.add(request) for request in requests]
    while not engine.idle:
        engine.step()
    return [[sample.token_ids for sample in group.samples if sample is not None] for group in groups]


def free_state_slots(engine: LLMEngine) -> tuple[int, int]:
    return engine.scheduler.blocks.available_state_slots, engine.scheduler.blocks.state_slots


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_samples_of_a_prompt_fork_its_state(model: Transformer, request_of: MakeRequest, rows: int) -> None:
    """More samples than rows: the prompt keeps its state until the last has started, and the others run on copies. A prompt of
    whole blocks has no block to copy, and still a state."""
    asked = [request_of("whole", 2 * BLOCK_TOKENS, 5, 12), request_of("part", 21, 4, 9), request_of("one", 3, 1, 30)]
    expected = [tokens(LLMEngine(model, 16), [request])[0] for request in asked]
    assert len({tuple(sample) for sample in expected[0]}) == 5
    engine = LLMEngine(model, rows)
    assert tokens(engine, asked) == expected
    assert free_state_slots(engine) == (rows + 1, rows + 1)
    assert engine.stats().cache_use == 0


def test_state_slots_come_back_from_whatever_ends_early(
    model: Transformer, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(model, 3, prefill_tokens=16)
    for name in ("running", "waiting"):
        engine.add(request_of(name, 20, 2, 20))
    engine.add_scoring(range(1, 40), 1.0, "scored")
    for _ in range(4):
        engine.step()
    engine.commit(1)  # drops prompts and prefills
    assert free_state_slots(engine)[0] == free_state_slots(engine)[1] - len(engine.running)
    engine.abort("waiting")
    engine.abort_all()
    assert free_state_slots(engine) == (4, 4)
    expected = tokens(engine, [request_of("next", 20, 3, 10)])
    # NaN in a state_slot, from a step that broke off, reaches nobody.
    assert engine.cache.states is not None
    engine.add(request_of("broken", 20, 2, 20))
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(model, "logits", lambda x: torch.full((len(x), 48), torch.nan))
        with pytest.raises(DivergenceError):
            engine.step()
    engine.cache.states.memories.fill_(torch.nan)
    assert free_state_slots(engine) == (4, 4)
    assert tokens(engine, [request_of("next", 20, 3, 10)]) == expected


def test_taken_released_and_taken_again() -> None:
    pool = BlockManager(3, 4, 1)
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    first = pool.take(2)
    assert (first, pool.available) == ([0, 1], 1)
    pool.hold([0])
    pool.release([0, 1])
    assert pool.available == 2
    pool.release([0])
    assert pool.available == 3
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_the_longest_prefix_in_whole_blocks_is_found_and_held() -> None:
    pool = BlockManager(6, 2, 1)
    blocks = pool.take(3)
    pool.remember([1, 2, 3, 4, 5], blocks)  # the third is not full
    assert pool.find([1, 2, 3, 4, 5], 5) == blocks[:2]
    assert pool.find([1, 2, 3, 4], 3) == blocks[:1]  # no more than asked for
    assert pool.find([1, 2, 4, 4], 4) == blocks[:1]
    assert pool.find([2, 2, 3, 4], 4) == []
    assert pool.find([3, 4], 2) == []  # those tokens, but after others
    pool.release(blocks)
    assert pool.available == 3 + 1  # two of them are still held by those that found them


def test_what_nobody_holds_stays_findable_until_its_place_is_needed() -> None:
    pool = BlockManager(3, 2, 1)
    blocks = pool.take(2)
    pool.remember([1, 2, 3, 4], blocks)
    pool.release(blocks)
    assert pool.available == 3
    assert pool.take(1) == [2]  # the empty one first
    assert pool.take(1) == [blocks[1]]  # then the end of the prefix, before its beginning
    assert pool.find([1, 2, 3, 4], 4) == [blocks[0]]


def test_a_prefix_known_already_keeps_its_first_blocks() -> None:
    pool = BlockManager(4, 2, 1)
    first, second = pool.take(2), pool.take(2)
    pool.remember([1, 2, 3, 4], first)
    pool.remember([1, 2, 5, 6], second)
    assert pool.find([1, 2, 5, 6], 4) == [first[0], second[1]]


def test_nothing_is_found_after_forgetting_and_nothing_is_lost() -> None:
    pool = BlockManager(4, 2, 1)
    held, idle = pool.take(2), pool.take(2)
    pool.remember([1, 2, 3, 4], held)
    pool.remember([5, 6, 7, 8], idle)
    pool.release(idle)
    pool.forget()
    assert pool.find([1, 2], 2) == pool.find([5, 6], 2) == []
    assert pool.available == 2
    pool.release(held)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=40))
def test_a_found_block_holds_the_tokens_asked_for(actions: list[tuple[int, list[int]]]) -> None:
    pool = BlockManager(8, 2, 1)
    contents: dict[int, tuple[int, ...]] = {}  # what each block's keys were computed from: its tokens and all before
    held: list[list[int]] = []
    for kind, tokens in actions:
        if kind == 0 and held:
            pool.release(held.pop(len(tokens) % len(held)))
        elif kind == 1 and len(tokens) == 9:
            pool.forget()
        else:
            found = pool.find(tokens, len(tokens))
            for i, block in enumerate(found):
                assert contents[block] == tuple(tokens[: 2 * i + 2])
            missing = pool.blocks_for(len(tokens)) - len(found)
            if missing > pool.available:
                pool.release(found)
                continue
            blocks = found + pool.take(missing)
            assert len(set(blocks)) == len(blocks)
            for other in held:
                assert not set(other) & set(blocks[len(found) :])
            for i in range(len(found), len(blocks)):
                contents[blocks[i]] = tuple(tokens[: 2 * i + 2])
            pool.remember(tokens, blocks)
            held.append(blocks)
    for blocks in held:
        pool.release(blocks)
    assert pool.available == 8


def test_state_slots_are_of_one_holder_each() -> None:
    pool = BlockManager(1, 4, 3)
    taken = [pool.take_state_slot() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert pool.available_state_slots == 0
    pool.release([], taken[1])
    assert pool.available_state_slots == 1
    assert pool.take_state_slot() == taken[1]


def test_where_blocks_are_not_all_that_a_prefix_needs_none_is_found() -> None:
    for shares, found in ((True, [0]), (False, [])):
        pool = BlockManager(2, 2, 1, shares)
        blocks = pool.take(1)
        pool.remember([5, 6], blocks)
        pool.release(blocks)
        assert pool.find([5, 6, 7], 3) == found
