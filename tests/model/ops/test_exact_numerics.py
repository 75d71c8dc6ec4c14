"""Exact numerics: the same values as the fast ones, and the same bits whatever else is in the batch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.head import Head
from nmoe.model.logprobs import row_sums
from nmoe.model.moe import RouterTrace
from nmoe.model.ops.table import ops_for
from nmoe.model.ops.torch import TorchOps
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer

MakeModel = Callable[..., Transformer]

OPS = ops_for(torch.zeros(1), exact=True)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 40])
def test_an_exact_product_has_the_values_and_gradients_of_any(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs = [torch.randn(rows, 12, generator=generator), torch.randn(5, 12, generator=generator)]
    upstream = torch.randn(rows, 5, generator=generator)
    results = []
    for product in (OPS.linear, F.linear):
        x, weight = (t.clone().requires_grad_() for t in inputs)
        out = product(x, weight)
        out.backward(upstream)
        results.append((out.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_their_number() -> None:
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((96, 160), (96, 7), (700, 3), (5, 96)):
        x, weight = torch.randn(64, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
        whole = OPS.linear(x, weight)
        for rows in (1, 2, 5, 7, 8, 9, 31):
            assert torch.equal(OPS.linear(x[:rows], weight), whole[:rows])
            assert torch.equal(OPS.linear(x[-rows:], weight), whole[-rows:])


def test_groups_do_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(60, 40, generator=generator), torch.randn(3, 40, 6, generator=generator)
    whole = OPS.linear_by_group(x, weight, [20, 0, 40])
    for rows in (1, 3, 17):
        assert torch.equal(OPS.linear_by_group(x[:rows], weight, [rows, 0, 0]), whole[:rows])
        assert torch.equal(OPS.linear_by_group(x[-rows:], weight, [0, 0, rows]), whole[-rows:])


def test_a_reward_does_not_depend_on_what_else_is_scored() -> None:
    generator = torch.Generator().manual_seed(0)
    head, x = Head(96, 1, "reward"), torch.randn(64, 96, generator=generator)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
        head.bias.fill_(0.5)
        whole = head(x, exact=True)
        torch.testing.assert_close(whole, head(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(torch.cat([head(row, exact=True) for row in x.split(1)]), whole)


def test_a_tokens_experts_are_added_alike_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(200, 50, generator=generator), torch.rand(50, 4, generator=generator)
    places = torch.randperm(200, generator=generator).view(50, 4)
    whole = OPS.combine(rows, weights, places)
    torch.testing.assert_close(whole, TorchOps().sum_rows(rows, weights, places), rtol=1e-5, atol=1e-6)
    for tokens in (1, 2, 3, 31):
        assert torch.equal(OPS.combine(rows, weights[:tokens], places[:tokens]), whole[:tokens])


def test_a_row_of_a_large_vocabulary_is_summed_alike_alone_and_among_others() -> None:
    threads = torch.get_num_threads()
    x = 8 * torch.rand(20, 40_001, generator=torch.Generator().manual_seed(0)).exp()
    torch.set_num_threads(2)
    try:
        alone = torch.cat([row_sums(row) for row in x.split(1)])
        assert torch.equal(alone, row_sums(x))
        assert not torch.equal(torch.cat([row.sum(-1) for row in x.split(1)]), alone)  # or nobody needs it
    finally:
        torch.set_num_threads(threads)


def logits(model: Transformer, sequences: list[Tensor]) -> list[Tensor]:
    lengths = [len(ids) for ids in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    attend = PackedAttention(lengths, positions.device, model.exact)
    with torch.no_grad():
        return list(model.logits(model(torch.cat(sequences), positions, attend, RouterTrace())).split(lengths))


@pytest.mark.parametrize("experts", [6, 0], ids=["moe", "dense"])
def test_exact_values_are_those_of_the_fast_path(tiny_model: MakeModel, experts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(48, (length,), generator=generator) for length in (3, 17, 1, 30)]
    model = tiny_model(experts=experts)
    fast = logits(model, sequences)
    exact = logits(model.set_numerics("exact"), sequences)
    assert not all(map(torch.equal, exact, fast))  # the switch does something
    for ours, theirs in zip(exact, fast, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert all(map(torch.equal, logits(model.set_numerics("fast"), sequences), fast))


@pytest.mark.parametrize("experts", [6, 0], ids=["moe", "dense"])
def test_exact_bits_do_not_depend_on_the_batch(tiny_model: MakeModel, experts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(48, (length,), generator=generator) for length in (3, 17, 1, 30, 5, 9)]
    model = tiny_model(experts=experts).set_numerics("exact")
    together = logits(model, sequences)
    for ids, packed in zip(sequences, together, strict=True):
        assert torch.equal(logits(model, [ids])[0], packed)
        assert torch.equal(logits(model, [ids[:1]])[0], packed[:1])  # nor on what follows


def test_the_exact_sigmoid_gives_an_element_the_same_bits_anywhere() -> None:
    x = 4 * torch.randn(300, generator=torch.Generator().manual_seed(0))
    whole = OPS.sigmoid(x)
    assert all(torch.equal(OPS.sigmoid(x[:length]), whole[:length]) for length in range(1, 300))
    assert torch.equal(OPS.sigmoid(x.view(3, 100)[:, :50]), whole.view(3, 100)[:, :50])
    torch.testing.assert_close(whole, torch.sigmoid(x), rtol=1e-6, atol=0)
    far = torch.tensor([-1000.0, 0.0, 1000.0], requires_grad=True)
    OPS.sigmoid(far).sum().backward()
    assert far.grad is not None
    assert far.grad.tolist() == [0.0, 0.25, 0.0]
    assert torch.autograd.gradcheck(OPS.sigmoid, x[:5].double().requires_grad_())
