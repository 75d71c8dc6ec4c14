"""The optimizer against torch's own, step by step; clipping, refusal and saving."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nmoe.errors import UserError
from nmoe.learner.optimizer import Optimizer, OptimizerSettings
from nmoe.learner.schedule import learning_rate_factor


class Small(nn.Module):
    """A matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))


def give_gradient(model: nn.Module, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("size", [0.1, 10.0])  # below and above the clipping norm
def test_equals_torch_adamw_with_clipping_and_schedule(size: float) -> None:
    settings = OptimizerSettings(
        0.05, warmup_steps=2, min_lr_ratio=0.3, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-3, max_grad_norm=1.5
    )
    ours, reference = Small(), Small()
    optimizer = Optimizer(ours, settings, total_steps=6)
    groups = [
        {"params": [reference.matrix], "weight_decay": 0.1},
        {"params": [reference.scale], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), eps=1e-3, fused=False, foreach=False)
    for step in range(6):
        give_gradient(ours, step, size)
        give_gradient(reference, step, size)
        assert ours.matrix.grad is not None
        assert ours.scale.grad is not None
        norm = float(torch.cat([ours.matrix.grad.flatten(), ours.scale.grad]).norm())
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, 1.5 / norm)
        rate = 0.05 * learning_rate_factor(step, 6, 2, 0.3)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        assert optimizer.step() == pytest.approx((norm, rate), rel=1e-5)
        for mine, theirs in zip(values(ours), values(reference), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert all(parameter.grad is None for parameter in ours.parameters())
    assert optimizer.steps == 6


def test_first_step_by_hand() -> None:
    model = Small()
    optimizer = Optimizer(model, OptimizerSettings(0.1, weight_decay=0.5, eps=1.0, max_grad_norm=1.0), total_steps=10)
    model.matrix.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    model.scale.grad = torch.tensor([0.0, 4.0])
    assert optimizer.step() == (5.0, 0.1)
    # Clipped to a norm of 1: 0.6 and 0.8; a first step is lr * g / (|g| + eps); decay takes 5 % off matrices alone.
    assert model.matrix.tolist()[0] == pytest.approx([0.95 - 0.1 * 0.6 / 1.6, -2 * 0.95], abs=1e-5)
    assert model.matrix.tolist()[1] == pytest.approx([0.5 * 0.95, 3 * 0.95], abs=1e-5)
    assert model.scale.tolist() == pytest.approx([1.0, 2.0 - 0.1 * 0.8 / 1.8], abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_steps_nothing(bad: float) -> None:
    model = Small()
    optimizer = Optimizer(model, OptimizerSettings(0.1), total_steps=10)
    give_gradient(model, 0)
    optimizer.step()
    before = values(model)
    give_gradient(model, 1)
    assert model.scale.grad is not None
    model.scale.grad[1] = bad
    with pytest.raises(FloatingPointError, match="at optimizer step 1: no step was taken"):
        optimizer.step()
    assert all(torch.equal(now, was) for now, was in zip(values(model), before, strict=True))
    assert optimizer.steps == 1


def test_saved_and_loaded_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    settings = OptimizerSettings(0.05, warmup_steps=3, weight_decay=0.1)
    model = Small()
    optimizer = Optimizer(model, settings, total_steps=8)
    for step in range(4):
        give_gradient(model, step)
        optimizer.step()
    optimizer.save(tmp_path)
    copy = Small()
    copy.load_state_dict(model.state_dict())
    resumed = Optimizer(copy, settings, total_steps=8)
    resumed.load(tmp_path)
    assert resumed.steps == 4
    for step in range(4, 8):
        for each, its_optimizer in ((model, optimizer), (copy, resumed)):
            give_gradient(each, step)
            its_optimizer.step()
        for ours, theirs in zip(values(model), values(copy), strict=True):
            assert torch.equal(ours, theirs)


def test_an_optimizer_that_has_not_stepped_saves_and_loads(tmp_path: Path) -> None:
    Optimizer(Small(), OptimizerSettings(0.1), 5).save(tmp_path)
    model, fresh = Small(), Small()
    loaded = Optimizer(model, OptimizerSettings(0.1), 5)
    loaded.load(tmp_path)
    other = Optimizer(fresh, OptimizerSettings(0.1), 5)
    for each, its_optimizer in ((model, loaded), (fresh, other)):
        give_gradient(each, 0)
        its_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model), values(fresh), strict=True))


def without_the_matrix(directory: Path) -> None:
    tensors = load_file(directory / "optimizer.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("matrix")}, directory / "optimizer.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "optimizer.safetensors").unlink(), "missing or torn"),
        (lambda d: (d / "optimizer.json").unlink(), "missing or torn"),
        (lambda d: (d / "optimizer.json").write_text("{"), "missing or torn"),
        (lambda d: (d / "optimizer.json").write_text(json.dumps({})), "missing or torn"),
        (lambda d: (d / "optimizer.safetensors").write_bytes(b"short"), "missing or torn"),
        (without_the_matrix, r"optimizer\.safetensors: no state for parameter matrix"),
    ],
)
def test_broken_state_is_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    model = Small()
    optimizer = Optimizer(model, OptimizerSettings(0.1), 5)
    give_gradient(model, 0)
    optimizer.step()
    optimizer.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        Optimizer(Small(), OptimizerSettings(0.1), 5).load(tmp_path)
    assert str(tmp_path) in str(raised.value)
