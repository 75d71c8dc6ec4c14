"""Low-rank updates: where they lie, what they compute, what they leave alone, and that engine and learner agree on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.checkpoint import fingerprint, save_model
from nmoe.model.config import LatentAttention
from nmoe.model.lora import Lora, LoraSettings, Site, choose, refuse_high_rank, sites
from nmoe.model.low_rank import ExpertsLowRank, LowRank
from nmoe.model.moe import ExpertsByGroupedMM, ExpertsByLoop, ExpertsByPadding, ExpertWeights, RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer

Make = Callable[..., Transformer]
DENSE: dict[str, Any] = {"experts": 0, "experts_per_token": 0, "expert_width": 0, "shared_experts": 0}
LATENT: dict[str, Any] = {
    "latent": LatentAttention(q_rank=12, kv_rank=8, nope_dim=6, rope_dim=2, value_dim=4),
    "kv_heads": 4,
    "qk_norm": False,
    "dense_layers": (0,),
}
ALL_OF_MOE = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "down_proj",
    "experts.gate_up_proj",
    "experts.down_proj",
)


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def logits(model: Transformer, tokens: int = 30) -> Tensor:
    ids = torch.randint(48, (tokens,), generator=torch.Generator().manual_seed(5))
    return model.logits(model(ids, torch.arange(tokens), PackedAttention([tokens], ids.device), RouterTrace()))


def adapted(model: Transformer, targets: tuple[str, ...] = (), rank: int = 4, **settings: Any) -> Lora:
    """An adapter none of whose numbers is zero."""
    lora = Lora(model, LoraSettings(rank, 6.0, **settings), choose(model, targets), "base", "f").initialize(1)
    generator = torch.Generator().manual_seed(2)
    for site in lora.sites:
        b = lora.part(site)[1]
        b.copy_(0.3 * torch.randn(b.shape, generator=generator))
    return lora


def test_one_layer_by_hand() -> None:
    update = LowRank(inputs=2, spans=((0, 1), (2, 4)), rank=1, scale=0.5, like=torch.zeros(1))
    with torch.no_grad():
        update.a_GD.copy_(torch.tensor([[1.0, 2.0], [3.0, -1.0]]))
        update.b_Sr.copy_(torch.tensor([[10.0], [1.0], [-2.0]]))
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    bias = torch.tensor([0.0, 100.0, 0.0, 0.0])
    # x = (2, 3): A x = (8, 3); the first adds 0.5 * 8 * 10 to output 0, the second 0.5 * 3 * (1, -2) to outputs 2 and 3.
    expected = [2.0 + 40.0, 3.0 + 100.0, 5.0 + 1.5, -3.0]
    x = torch.tensor([[2.0, 3.0]])
    assert update(x, weight, bias).tolist() == [expected]
    with torch.inference_mode():
        assert update(x, weight, bias).tolist() == [expected]
    merged = update.merged(weight)
    assert (x @ merged.T + bias).tolist() == [expected]
    assert weight.sum() == 4, "merging makes a copy"


def test_gradients_are_those_of_the_sum(tiny_model: Make) -> None:
    generator = torch.Generator().manual_seed(0)
    update = LowRank(5, ((0, 3), (4, 6)), 2, 1.5, torch.zeros((), dtype=torch.float64))
    for parameter in update.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (7, 6))
    bias = torch.randn(6, generator=generator, dtype=torch.float64)

    def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        update.a_GD.data, update.b_Sr.data = a.data, b.data
        return torch.func.functional_call(update, {"a_GD": a, "b_Sr": b}, (x, weight, bias))

    inputs = [t.detach().requires_grad_() for t in (x, update.a_GD, update.b_Sr)]
    assert torch.autograd.gradcheck(layer, inputs)


def test_experts_in_one_product_or_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    first, second = ExpertsLowRank(3, 8, 16, 4, 0.5, random(1)), ExpertsLowRank(3, 8, 8, 4, 2.0, random(1))
    for update in (first, second):
        for parameter in update.parameters():
            parameter.data = random(*parameter.shape)
    gate_up, down, x, counts = random(3, 8, 16), random(3, 8, 8), random(9, 8), torch.tensor([4, 0, 5])
    weights = ExpertWeights(gate_up, down, gate_up_adapter=first, down_adapter=second)
    merged = ExpertWeights(first.merged(gate_up), second.merged(down))
    torch.testing.assert_close(
        first.merged(gate_up)[2], gate_up[2] + 0.5 * first.a_EDr[2] @ first.b_ErF[2], rtol=1e-6, atol=1e-6
    )
    expected = ExpertsByLoop(x, counts, merged).run()
    torch.testing.assert_close(ExpertsByLoop(x, counts, weights).run(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ExpertsByGroupedMM(x, counts, weights).run(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ExpertsByPadding(x, counts, weights).run(), expected, rtol=1e-4, atol=1e-4)


def test_where_the_projections_lie(tiny_model: Make) -> None:
    of_layer_1 = [site for site in sites(tiny_model()) if ".1." in site.theirs]
    assert of_layer_1 == [
        Site("q_proj", "model.layers.1.self_attn.q_proj", "blocks.1.attention.qkv_proj", (0, 32)),
        Site("k_proj", "model.layers.1.self_attn.k_proj", "blocks.1.attention.qkv_proj", (32, 48)),
        Site("v_proj", "model.layers.1.self_attn.v_proj", "blocks.1.attention.qkv_proj", (48, 64)),
        Site("o_proj", "model.layers.1.self_attn.o_proj", "blocks.1.attention.o_proj", (0, 32)),
        Site("experts.gate_up_proj", "model.layers.1.mlp.experts.gate_up_proj", "blocks.1.ffn", (0, 32)),
        Site("experts.down_proj", "model.layers.1.mlp.experts.down_proj", "blocks.1.ffn", (0, 32)),
        Site("gate_proj", "model.layers.1.mlp.shared_experts.gate_proj", "blocks.1.ffn.shared.gate_up_proj", (0, 16)),
        Site("up_proj", "model.layers.1.mlp.shared_experts.up_proj", "blocks.1.ffn.shared.gate_up_proj", (16, 32)),
        Site("down_proj", "model.layers.1.mlp.shared_experts.down_proj", "blocks.1.ffn.shared.down_proj", (0, 32)),
    ]
    latent = [site for site in sites(tiny_model(**LATENT)) if ".0." in site.theirs]
    assert [(site.target, site.ours.removeprefix("blocks.0."), site.span) for site in latent] == [
        ("q_a_proj", "attention.q_a_proj", (0, 12)),
        ("q_b_proj", "attention.q_proj", (0, 32)),
        ("kv_a_proj_with_mqa", "attention.kv_a_proj", (0, 10)),
        ("kv_b_proj", "attention.kv_b_proj", (0, 40)),
        ("o_proj", "attention.o_proj", (0, 32)),
        ("gate_proj", "ffn.gate_up_proj", (0, 48)),
        ("up_proj", "ffn.gate_up_proj", (48, 96)),
        ("down_proj", "ffn.down_proj", (0, 32)),
    ]


def test_what_is_adapted_unless_one_says_more(tiny_model: Make) -> None:
    def targets(model: Transformer) -> set[str]:
        return {site.target for site in choose(model, ())}

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert targets(tiny_model()) == attention
    assert targets(tiny_model(**DENSE)) == attention | {"gate_proj", "up_proj", "down_proj"}
    assert targets(tiny_model(**LATENT)) == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


def test_an_unknown_target_says_what_was_probably_meant(tiny_model: Make) -> None:
    with pytest.raises(UserError, match=r"'q_projj' is not in this model, which has .*; did you mean 'q_proj'\?"):
        choose(tiny_model(), ("o_proj", "q_projj"))
    with pytest.raises(UserError, match=r"'experts\.down_proj' is not in this model"):
        choose(tiny_model(**DENSE), ("experts.down_proj",))


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"rank": 2.0}, {"alpha": 0.0}, {"alpha": float("nan")}])
def test_rank_and_alpha_are_above_zero(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"lora (rank|alpha) = "):
        LoraSettings(**wrong)


@pytest.mark.parametrize(
    ("changes", "targets", "most", "named"),
    [
        (DENSE, (), 16, "model.layers.0.self_attn.k_proj has 16 outputs and 32 inputs"),  # two key heads of width 8
        (DENSE, ("down_proj",), 32, "model.layers.0.mlp.down_proj has 32 outputs and 48 inputs"),
        ({}, ("experts.gate_up_proj",), 32, "model.layers.0.mlp.experts.gate_up_proj has 32 outputs and 32 inputs"),
        ({}, ("experts.down_proj",), 16, "model.layers.0.mlp.experts.down_proj has 32 outputs and 16 inputs"),
        (LATENT, (), 8, "model.layers.0.self_attn.kv_b_proj has 40 outputs and 8 inputs"),
        ({"shared_gate": True}, ("q_proj", "shared_expert_gate"), 32, "model.layers.0.self_attn.q_proj has 32 outputs"),
    ],
)
def test_a_rank_above_the_smallest_dimension_is_refused(
    tiny_model: Make, changes: dict[str, Any], targets: tuple[str, ...], most: int, named: str
) -> None:
    model = tiny_model(**changes)
    chosen = choose(model, targets)
    refuse_high_rank(model, chosen, most)
    with pytest.raises(
        UserError, match=rf"^lora\.rank = {most + 1} is more than {most}, .*: {named}.*to {most} or less$"
    ):
        refuse_high_rank(model, chosen, most + 1)


def test_scales(tiny_model: Make) -> None:
    site = sites(tiny_model())[0]
    assert LoraSettings(16, 8.0).of(site) == (16, 0.5)
    assert LoraSettings(16, 8.0, rslora=True).of(site) == (16, 2.0)
    pattern = LoraSettings(16, 8.0, rank_pattern={"layers.0.self_attn.q_proj": 4}, alpha_pattern={"q_proj": 2})
    assert pattern.of(site) == (4, 0.5)
    assert pattern.of(sites(tiny_model())[1]) == (16, 0.5)


# A rank of 3 is one that the grouped product does not take.
@pytest.mark.parametrize(
    ("shape", "rank"), [({}, 4), ({}, 3), (DENSE, 4), (LATENT, 4)], ids=["moe", "moe3", "dense", "latent"]
)
def test_begins_as_no_change_and_steps_aside_to_the_bit(tiny_model: Make, shape: dict[str, Any], rank: int) -> None:
    model = tiny_model(**shape)
    targets = tuple({site.target for site in sites(model)})
    base, own = logits(model).detach(), weights(model)
    lora = Lora(model, LoraSettings(rank, 6.0), choose(model, targets), "base", "f").initialize(0)
    assert torch.equal(logits(model), base)
    for site in lora.sites:
        a, b = lora.part(site)
        bound = a.shape[-1] ** -0.5
        assert 0.8 * bound < a.abs().max() <= bound
        assert a.std() == pytest.approx(bound / 3**0.5, rel=0.15)
        assert not b.any()
        b.normal_()
    changed = logits(model).detach()
    assert (changed - base).abs().mean() > 0.1
    with lora.disabled():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), changed)
    with lora.merged():
        assert not any("adapter" in name for name in model.state_dict())
        torch.testing.assert_close(logits(model), changed, rtol=0, atol=1e-3)
    with lora.disabled():
        assert all(torch.equal(tensor, own[name]) for name, tensor in weights(model).items()), "the base is as it was"
    with pytest.raises(ZeroDivisionError), lora.merged():
        raise ZeroDivisionError
    assert torch.equal(logits(model), changed)


def test_only_the_adapter_is_trained(tiny_model: Make) -> None:
    model = tiny_model()
    lora = adapted(model, ALL_OF_MOE)
    logits(model).square().mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in lora.parameters()}
    assert all("adapter" in name for name in trained)
    assert not any("router" in name for name in trained)


def test_the_fingerprint_is_that_of_every_weight(tiny_model: Make, tmp_path: Path) -> None:
    def of(model: Transformer, name: str, **how: Any) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        save_model(model, tmp_path / name, **how)
        return fingerprint(tmp_path / name)

    model = tiny_model()
    own = of(model, "whole")
    assert own == of(model, "in shards", shard_bytes=10_000)
    assert len(list((tmp_path / "in shards").glob("*.safetensors"))) > 3
    assert own != of(tiny_model(rotary_dim=4), "partly turned")
    assert own != of(tiny_model(rope_theta=123.0), "other") != of(model.bfloat16(), "rounded") != own
    model = tiny_model()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            before = tensor.clone()
            tensor.view(-1)[-1] += 1
            assert of(model, "whole") != own, name
            tensor.copy_(before)
    assert of(model, "whole") == own


@pytest.mark.parametrize("shape", [{}, DENSE, LATENT], ids=["moe", "dense", "latent"])
def test_exact_numerics_do_not_depend_on_the_batch(tiny_model: Make, shape: dict[str, Any]) -> None:
    model = tiny_model(**shape).set_numerics("exact")
    adapted(model, tuple({site.target for site in sites(model)}))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(48, (300,), generator=generator)
    lengths = [60, 1, 3, 50, 17, 60, 60, 49]
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        whole = model(ids, positions, PackedAttention(lengths, ids.device, True), RouterTrace())
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone = model(ids[part], positions[part], PackedAttention([length], ids.device, True), RouterTrace())
            assert torch.equal(alone, whole[part])
            start += length
