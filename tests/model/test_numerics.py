"""Exact numerics: the same values as the fast ones, and the same bits whatever else is in the batch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.model.moe import ExpertWeights, RouterTrace, experts_by_grouped_mm
from nmoe.model.numerics import least_rows, linear, sigmoid, with_full_groups
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer

MakeModel = Callable[..., Transformer]


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 40])
def test_padding_a_product_changes_neither_its_values_nor_its_gradients(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs = [torch.randn(rows, 12, generator=generator), torch.randn(5, 12, generator=generator)]
    upstream = torch.randn(rows, 5, generator=generator)
    results = []
    for product in (lambda x, w: linear(x, w, True), F.linear):
        x, weight = (t.clone().requires_grad_() for t in inputs)
        out = product(x, weight)
        out.backward(upstream)
        results.append((out.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [[3, 0, 12, 1, 8], [0, 0, 24, 0, 0], [9, 8, 8, 10, 8], [1] * 5], ids=str)
def test_padding_groups_changes_neither_values_nor_gradients(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    counts_E, rows = torch.tensor(counts), sum(counts)
    expert_R = torch.repeat_interleave(torch.arange(5), counts_E)
    inputs = [torch.randn(shape, generator=generator) for shape in [(rows, 8), (5, 8, 24), (5, 12, 8)]]
    upstream = torch.randn(rows, 8, generator=generator)
    results = []
    for padded in (True, False):
        x, gate_up, down = (t.clone().requires_grad_() for t in inputs)

        def experts(rows_RD: Tensor, counts_E: Tensor, gate_up=gate_up, down=down) -> Tensor:
            return experts_by_grouped_mm(rows_RD, counts_E, ExpertWeights(gate_up, down))

        out = with_full_groups(experts, x, expert_R, counts_E, least_rows(x)) if padded else experts(x, counts_E)
        out.backward(upstream)
        results.append((out.detach(), x.grad, gate_up.grad, down.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="what oneDNN gives of a row's bits, others may not"
)
def test_rows_do_not_depend_on_their_number() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 96, generator=generator), torch.randn(160, 96, generator=generator)
    whole = linear(x, weight, exact=True)
    for rows in (1, 2, 5, 7, 8, 9, 31):
        assert torch.equal(linear(x[:rows], weight, exact=True), whole[:rows])


def test_groups_are_padded_and_cut_back() -> None:
    seen = []

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        seen.append(counts.tolist())
        return torch.cat([part * (10**e) for e, part in enumerate(rows.split(counts.tolist()))])

    rows = torch.arange(1.0, 5.0).unsqueeze(-1)
    out = with_full_groups(experts, rows, torch.tensor([0, 0, 2, 2]), torch.tensor([2, 0, 2]), least_rows(rows))
    assert out.flatten().tolist() == [1.0, 2.0, 300.0, 400.0]
    least = least_rows(rows)
    assert least > 1
    assert seen == [[8, least, 8]]  # up to a size of its octave, and an empty one to the least


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


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="what oneDNN gives of a row's bits, others may not"
)
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
    whole = sigmoid(x, exact=True)
    assert all(torch.equal(sigmoid(x[:length], exact=True), whole[:length]) for length in range(1, 300))
    assert torch.equal(sigmoid(x.view(3, 100)[:, :50], exact=True), whole.view(3, 100)[:, :50])
    torch.testing.assert_close(whole, torch.sigmoid(x), rtol=1e-6, atol=0)
    far = torch.tensor([-1000.0, 0.0, 1000.0], requires_grad=True)
    sigmoid(far, exact=True).sum().backward()
    assert far.grad is not None
    assert far.grad.tolist() == [0.0, 0.25, 0.0]
    assert torch.autograd.gradcheck(lambda x: sigmoid(x, True), x[:5].double().requires_grad_())
