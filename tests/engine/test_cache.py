"""The key-value cache: what goes in at a place comes out there, and attention over it is attention."""

import pytest
import torch

from nmoe.engine.native.cache import DecodeAttention, KVCache, PrefillAttention
from nmoe.model.attention import AttentionLayer
from nmoe.model.config import ModelConfig

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=8,
    hidden_size=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    context_tokens=6,
    experts=3,
    experts_per_token=2,
    expert_width=4,
)


def filled(rows: int) -> KVCache:
    """A cache of which every number is another."""
    cache = KVCache(CONFIG, rows, CPU, torch.float32)
    cache.keys.copy_(torch.arange(cache.keys.numel()).view(cache.keys.shape))
    cache.values.copy_(-cache.keys)
    assert cache.routes is not None
    cache.routes.copy_(torch.arange(cache.routes.numel()).view(cache.routes.shape))
    return cache


def test_a_fill_gives_the_same_positions_to_each_of_its_rows_and_to_no_other() -> None:
    cache, before = filled(4), filled(4)
    keys, values = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    routes = torch.arange(12, dtype=torch.int16).view(3, 2, 2) + 500
    cache.fill(slice(1, 3), keys, values, routes)
    assert cache.routes is not None
    assert before.routes is not None
    for row in (1, 2):
        assert torch.equal(cache.keys[:, row, :, :3], keys)
        assert torch.equal(cache.values[:, row, :, :3], values)
        assert torch.equal(cache.routes[row, :3], routes)
        assert torch.equal(cache.keys[:, row, :, 3:], before.keys[:, row, :, 3:])
        assert torch.equal(cache.routes[row, 3:], before.routes[row, 3:])
    for row in (0, 3):
        assert torch.equal(cache.keys[:, row], before.keys[:, row])
        assert torch.equal(cache.values[:, row], before.values[:, row])
        assert torch.equal(cache.routes[row], before.routes[row])


def test_a_move_takes_keys_values_and_routes_along() -> None:
    cache, before = filled(5), filled(5)
    cache.move(torch.tensor([0, 2]), torch.tensor([4, 3]), 4)
    assert cache.routes is not None
    assert before.routes is not None
    for target, source in ((0, 4), (2, 3)):
        assert torch.equal(cache.keys[:, target, :, :4], before.keys[:, source, :, :4])
        assert torch.equal(cache.values[:, target, :, :4], before.values[:, source, :, :4])
        assert torch.equal(cache.routes[target, :4], before.routes[source, :4])
        assert torch.equal(cache.keys[:, target, :, 4:], before.keys[:, target, :, 4:])
    for row in (1, 3, 4):
        assert torch.equal(cache.keys[:, row], before.keys[:, row])


def test_a_write_lands_at_each_rows_own_position() -> None:
    cache, before = filled(3), filled(3)
    positions = torch.tensor([5, 0])
    keys, values = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    cache.write(1, cache.places(positions), keys, values)
    routes = torch.tensor([[[1, 2], [0, 1]], [[2, 0], [2, 1]]], dtype=torch.int16)
    cache.write_routes(positions, routes)
    assert cache.routes is not None
    assert before.routes is not None
    for row, position in enumerate(positions.tolist()):
        assert torch.equal(cache.keys[1, row, :, position], keys[row])
        assert torch.equal(cache.values[1, row, :, position], values[row])
        assert torch.equal(cache.routes[row, position], routes[row])
    # Four places of one layer, two positions' routes, and nothing else.
    assert (cache.keys != before.keys).sum() == keys.numel()
    assert (cache.values != before.values).sum() == values.numel()
    assert set((cache.routes != before.routes).nonzero()[:, :2].unique(dim=0).flatten().tolist()) <= {0, 5, 1}


def test_a_dense_model_has_no_routes() -> None:
    cache = KVCache(ModelConfig(8, 8, 1, 1, 1, 2, 4, intermediate_size=4), 2, CPU, torch.float32)
    assert cache.routes is None
    cache.fill(slice(0, 1), torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), None)
    cache.move(torch.tensor([1]), torch.tensor([0]), 2)


def test_prefill_keeps_what_it_attended_over() -> None:
    attend = PrefillAttention([2, 3], CPU, exact=False)
    given = [(torch.randn(5, 4, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)) for _ in range(2)]
    for layer, (q, k, v) in enumerate(given):
        attend(AttentionLayer(layer, 0.5), q, k, v)
        assert attend.keys[layer] is k
        assert attend.values[layer] is v


def test_decode_attends_over_the_positions_that_are_there() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(CONFIG, 3, CPU, torch.float32)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    cache.keys[:, :, :, 5], cache.values[:, :, :, 5] = 1e4, 1e4  # what lies beyond must not count
    positions = torch.tensor([0, 3])
    q, k, v = (torch.randn(2, heads, 4, generator=generator) for heads in (4, 2, 2))
    out = DecodeAttention(cache, positions, 6)(AttentionLayer(1, 0.5), q, k, v)
    for row, position in enumerate(positions.tolist()):
        for head in range(4):
            keys = torch.cat([cache.keys[1, row, head // 2, :position], k[row, head // 2].unsqueeze(0)])
            values = torch.cat([cache.values[1, row, head // 2, :position], v[row, head // 2].unsqueeze(0)])
            expected = (keys @ q[row, head] / 2).softmax(0) @ values
            assert out[row, head].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
