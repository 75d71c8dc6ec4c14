"""Muon against singular vectors, against torch's own, and by which parameters it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_family
from torch import Tensor, nn

from nmoe.config.tables.model import OptimizerSection
from nmoe.errors import UserError
from nmoe.learner.muon import Matrices, hidden_matrices, orthogonalised, update_of
from nmoe.learner.optimizer import Optimizer
from nmoe.model.layers import Linear
from nmoe.model.transformer import Transformer

SETTINGS = OptimizerSection(kind="muon", learning_rate=0.02, weight_decay=0.1, min_lr_ratio=1.0, max_grad_norm=1e9)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (3, 24, 16), (2, 16, 24)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_singular_vectors_stay_and_singular_values_become_about_one(shape: tuple[int, ...], size: float) -> None:
    given = size * drawn(*shape)
    u, _, vh = torch.linalg.svd(given, full_matrices=False)
    turned = u.mT @ orthogonalised(given).float() @ vh.mT
    values = turned.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert float((turned - torch.diag_embed(values)).abs().max()) < 0.05


def test_matrices_of_one_parameter_are_orthogonalised_by_themselves() -> None:
    rows = drawn(24 + 8 + 8, 16)
    expected = [0.2 * max(part.shape) ** 0.5 * orthogonalised(part).float() for part in rows.split([24, 8, 8])]
    torch.testing.assert_close(update_of(rows, Matrices(0, (24, 8, 8))), torch.cat(expected), rtol=0.02, atol=0.01)
    experts = drawn(3, 16, 24)
    gates_and_ups = [
        torch.cat([0.2 * 4 * orthogonalised(half).float() for half in expert.split(12, -1)], -1) for expert in experts
    ]
    torch.testing.assert_close(
        update_of(experts, Matrices(2, (12, 12))), torch.stack(gates_and_ups), rtol=0.02, atol=0.01
    )
    assert float((update_of(experts, Matrices()) - torch.stack(gates_and_ups)).abs().max()) > 0.1


@pytest.mark.parametrize("shape", [(32, 16), (16, 48)])
def test_equals_torch_muon(shape: tuple[int, int]) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Linear(shape[1], shape[0])])
    weight = next(model.parameters())
    with torch.no_grad():
        weight.copy_(drawn(*shape))
    reference = nn.Parameter(weight.detach().clone())
    optimizer = Optimizer(model, SETTINGS, total_steps=9)
    theirs = torch.optim.Muon(
        [reference], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        weight.grad = drawn(*shape, seed=step + 1)
        reference.grad = weight.grad.clone()
        optimizer.step()
        theirs.step()
        # Newton-Schulz is computed in bfloat16; a step moves a weight by 0.004 in the root mean square.
        torch.testing.assert_close(weight, reference, rtol=0, atol=2e-4)
    moved = (weight - drawn(*shape)).square().mean().sqrt()
    assert moved.item() > 0.005


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_it_trains_the_matrices_within_blocks(family: str) -> None:
    model = tiny_family(family)
    optimizer = Optimizer(model, SETTINGS, total_steps=1)
    assert optimizer.muon is not None
    names = {name for name, mine in zip(optimizer.names, optimizer.stepped, strict=True) if mine in optimizer.muon}
    assert names == hidden_matrices(model).keys()
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        hidden = (
            name.startswith("blocks.") and parameter.ndim >= 2 and not last.endswith("bias") and ".router." not in name
        )
        assert (name in names) == hidden, name
    groups = [parameter for group in optimizer.adamw.param_groups for parameter in group["params"]]
    assert len(groups) + len(names) == len(optimizer.names)
    assert optimizer.muon.param_groups[0]["weight_decay"] == 0.1


def test_queries_keys_and_values_and_gates_are_apart() -> None:
    model = tiny_family("qwen3_moe")
    config, found = model.config, hidden_matrices(model)
    attention = found["blocks.0.attention.qkv_proj.weight"]
    assert attention.sizes == tuple(
        heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)
    )
    (experts,) = {one for name, one in found.items() if name.endswith(".gate_up")}
    assert experts == Matrices(2, (config.expert_width, config.expert_width))


def stepped(model: Transformer, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = drawn(*parameter.shape, seed=100 * step + number)
        optimizer.step()


def test_saved_and_loaded_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    model, copy = tiny_family("qwen3_moe"), tiny_family("qwen3_moe")
    optimizer = Optimizer(model, SETTINGS, total_steps=9)
    stepped(model, optimizer, range(3))
    optimizer.save(tmp_path)
    copy.load_state_dict(model.state_dict())
    resumed = Optimizer(copy, SETTINGS, total_steps=9)
    resumed.load(tmp_path)
    for one, its in ((model, optimizer), (copy, resumed)):
        stepped(one, its, range(3, 6))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), copy.parameters(), strict=True))
    state = {key.rpartition("/")[2] for key in optimizer.tensors()}
    assert state == {"momentum", "step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("before", "now"), [("muon", "adamw"), ("adamw", "muon")])
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path, before: str, now: str) -> None:
    model = tiny_family("qwen3_moe")
    optimizer = Optimizer(model, SETTINGS.model_copy(update={"kind": before}), total_steps=9)
    stepped(model, optimizer, range(1))
    optimizer.save(tmp_path)
    other = Optimizer(tiny_family("qwen3_moe"), SETTINGS.model_copy(update={"kind": now}), total_steps=9)
    with pytest.raises(UserError, match=rf'was trained by another optimizer; resume with optimizer\.kind = "{before}"'):
        other.load(tmp_path)
