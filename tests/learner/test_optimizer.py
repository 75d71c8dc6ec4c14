"""The optimizer against torch's own, step by step; clipping, refusal and saving; the learning-rate schedule."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_family
from torch import Tensor, nn

import nmoe.learner.optimizer as optimizer_module
from nmoe.config.tables.model import OptimizerSection
from nmoe.errors import DivergenceError, UserError
from nmoe.learner.optimizer import Optimizer, StepResult
from nmoe.learner.schedule import Schedule, learning_rate_factor, resumed_schedule


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
    settings = OptimizerSection(
        learning_rate=0.05,
        warmup_steps=2,
        min_lr_ratio=0.3,
        weight_decay=0.1,
        beta1=0.8,
        beta2=0.9,
        eps=1e-3,
        max_grad_norm=1.5,
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
        result = optimizer.step()
        assert (result.grad_norm, result.learning_rate) == pytest.approx((norm, rate), rel=1e-5)
        assert (result.loss_scale, result.overflow) == (None, False)
        for mine, theirs in zip(values(ours), values(reference), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert all(parameter.grad is None for parameter in ours.parameters())
    assert optimizer.steps == 6


def test_other_settings_count_from_the_next_step_on() -> None:
    first = OptimizerSection(learning_rate=0.05, min_lr_ratio=1.0)
    later = OptimizerSection(
        learning_rate=0.01, min_lr_ratio=1.0, weight_decay=0.2, beta1=0.5, beta2=0.7, eps=1e-2, max_grad_norm=0.5
    )
    ours, reference = Small(), Small()
    optimizer = Optimizer(ours, first, total_steps=1)
    groups = [{"params": [reference.matrix]}, {"params": [reference.scale]}]
    adamw = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0, fused=False, foreach=False)
    for step in range(4):
        if step == 2:
            optimizer.change(later)
            for group, decay in zip(adamw.param_groups, (0.2, 0.0), strict=True):
                group.update(lr=0.01, betas=(0.5, 0.7), eps=1e-2, weight_decay=decay)
        give_gradient(ours, step)
        give_gradient(reference, step)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), optimizer.settings.max_grad_norm)
        assert optimizer.step().learning_rate == (0.05 if step < 2 else 0.01)
        adamw.step()
        torch.testing.assert_close(values(ours), values(reference))


def test_weight_decay_leaves_every_bias_and_norm_alone() -> None:
    """Those of a layer's experts are stacked to a matrix."""
    model = tiny_family("gpt_oss")
    optimizer = Optimizer(model, OptimizerSection(learning_rate=1e-3, weight_decay=0.1), total_steps=1)
    decayed, plain = ({id(p) for p in group["params"]} for group in optimizer.adamw.param_groups)
    names = dict(zip(map(id, optimizer.masters), optimizer.names, strict=True))
    assert {names[key].rpartition(".")[2] for key in decayed} == {"weight", "gate_up", "down"}
    assert {"gate_up_bias", "down_bias"} < {names[key].rpartition(".")[2] for key in plain}


def test_first_step_by_hand() -> None:
    model = Small()
    optimizer = Optimizer(
        model, OptimizerSection(learning_rate=0.1, weight_decay=0.5, eps=1.0, max_grad_norm=1.0), total_steps=10
    )
    model.matrix.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    model.scale.grad = torch.tensor([0.0, 4.0])
    assert optimizer.step() == StepResult(5.0, 0.1)
    # Clipped to a norm of 1: 0.6 and 0.8; a first step is lr * g / (|g| + eps); decay takes 5 % off matrices alone.
    assert model.matrix.tolist()[0] == pytest.approx([0.95 - 0.1 * 0.6 / 1.6, -2 * 0.95], abs=1e-5)
    assert model.matrix.tolist()[1] == pytest.approx([0.5 * 0.95, 3 * 0.95], abs=1e-5)
    assert model.scale.tolist() == pytest.approx([1.0, 2.0 - 0.1 * 0.8 / 1.8], abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_steps_nothing(bad: float) -> None:
    model = Small()
    optimizer = Optimizer(model, OptimizerSection(learning_rate=0.1), total_steps=10)
    give_gradient(model, 0)
    optimizer.step()
    before = values(model)
    give_gradient(model, 1)
    assert model.scale.grad is not None
    model.scale.grad[1] = bad
    with pytest.raises(
        DivergenceError, match=r"optimizer step 2: the gradient of scale is not finite; no step was taken"
    ):
        optimizer.step()
    assert all(torch.equal(now, was) for now, was in zip(values(model), before, strict=True))
    assert optimizer.steps == 1


def test_saved_and_loaded_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    settings = OptimizerSection(learning_rate=0.05, warmup_steps=3, weight_decay=0.1)
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
    Optimizer(Small(), OptimizerSection(learning_rate=0.1), 5).save(tmp_path)
    model, fresh = Small(), Small()
    loaded = Optimizer(model, OptimizerSection(learning_rate=0.1), 5)
    loaded.load(tmp_path)
    other = Optimizer(fresh, OptimizerSection(learning_rate=0.1), 5)
    for each, its_optimizer in ((model, loaded), (fresh, other)):
        give_gradient(each, 0)
        its_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model), values(fresh), strict=True))


def half(model: nn.Module, precision: torch.dtype) -> nn.Module:
    """The model with its matrix in low precision; the vector stays in fp32, as routers do."""
    model.matrix.data = model.matrix.data.to(precision)
    return model


def test_small_steps_add_up_in_masters() -> None:
    # 100 steps of 1e-4 from 1: bf16 alone would round each of them away.
    model = half(Small(), torch.bfloat16)
    optimizer = Optimizer(model, OptimizerSection(learning_rate=1e-4, min_lr_ratio=1.0), total_steps=100)
    for _ in range(100):
        for _ in range(2):  # micro-batches
            (model.matrix.float().sum() / 2 + model.scale.sum() / 2).backward()
        assert model.matrix.grad is None  # moved to the master
        optimizer.step()
    assert model.matrix.dtype == torch.bfloat16
    assert optimizer.masters[0].tolist()[0] == pytest.approx([0.99, -2.01], abs=2e-5)
    assert torch.equal(model.matrix, optimizer.masters[0].bfloat16())
    assert model.matrix[0, 0].item() == pytest.approx(0.99, abs=2e-3)
    assert optimizer.masters[1] is model.scale


def test_gradients_are_gathered_in_fp32() -> None:
    model = half(Small(), torch.bfloat16)
    optimizer = Optimizer(model, OptimizerSection(learning_rate=1e-4, max_grad_norm=1e9), total_steps=100)
    for factor in (256.0, 1.0):  # in bf16, 256 + 1 = 256
        (factor * model.matrix[0, 0]).backward()
    grad = optimizer.masters[0].grad
    assert grad is not None
    assert grad[0, 0].item() == 257.0


def test_gradients_of_a_step_lie_in_one_buffer_which_ends_with_it() -> None:
    model = Small().bfloat16()
    optimizer = Optimizer(model, OptimizerSection(learning_rate=0.1), total_steps=2)
    (model.matrix.sum() * 3).backward()
    matrix, scale = optimizer.masters
    assert matrix.grad is not None
    assert matrix.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert scale.grad is None, "what has no gradient is not stepped, and not decayed"
    (2 * model.scale.sum()).backward()
    (model.scale * torch.tensor([1.0, 5.0])).sum().backward()
    assert scale.grad is not None
    assert scale.grad.tolist() == [3.0, 7.0]
    assert matrix.grad.untyped_storage().data_ptr() == scale.grad.untyped_storage().data_ptr()
    assert matrix.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    optimizer.step()
    assert matrix.grad is None
    assert optimizer._gradients._buffer is None


def test_loss_scale_halves_on_overflow_and_grows_after_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "GROWTH_STEPS", 3)
    model = half(Small(), torch.float16)
    optimizer = Optimizer(
        model, OptimizerSection(learning_rate=0.1, min_lr_ratio=1.0, max_grad_norm=1e9), total_steps=10
    )
    assert optimizer.loss_scale == 2.0**16

    def step(gradient: float) -> StepResult:
        (gradient * model.matrix[0, 0] * optimizer.loss_scale).backward()
        return optimizer.step()

    before = values(model)
    assert step(2.0) == StepResult(None, 0.1, 2.0**16, overflow=True)  # 2^17 is beyond fp16
    assert all(torch.equal(now, was) for now, was in zip(values(model), before, strict=True))
    assert optimizer.steps == 0
    assert [step(0.5) for _ in range(3)] == [StepResult(0.5, 0.1, 2.0**15)] * 3
    assert optimizer.loss_scale == 2.0**16
    assert optimizer.steps == 3
    assert model.matrix[0, 0].item() == pytest.approx(1.0 - 3 * 0.1, abs=2e-3)
    assert torch.equal(model.matrix[1], before[0][1])


def test_a_gradient_that_no_scale_saves_is_divergence() -> None:
    model = half(Small(), torch.float16)
    optimizer = Optimizer(model, OptimizerSection(learning_rate=0.1), total_steps=10)
    for _ in range(16):
        (float("nan") * model.matrix[0, 0]).backward()
        assert optimizer.step().overflow
    (float("nan") * model.matrix[0, 0]).backward()
    with pytest.raises(DivergenceError, match="the gradient of matrix is not finite"):
        optimizer.step()


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_masters_are_saved_and_loaded_to_the_bit(tmp_path: Path, precision: torch.dtype) -> None:
    def run(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            target = torch.randn(2, 2, generator=torch.Generator().manual_seed(step))
            loss = (model.matrix.float() - target).square().sum() + model.scale.square().sum()
            (loss * optimizer.loss_scale).backward()
            optimizer.step()

    settings = OptimizerSection(learning_rate=1e-3, max_grad_norm=1e9)
    model = half(Small(), precision)
    optimizer = Optimizer(model, settings, total_steps=12)
    run(model, optimizer, range(6))
    optimizer.save(tmp_path)
    copy = half(Small(), precision)
    copy.load_state_dict(model.state_dict())
    resumed = Optimizer(copy, settings, total_steps=12)
    resumed.load(tmp_path)
    assert resumed.loss_scale == optimizer.loss_scale
    assert resumed.loss_scale == (2.0**13 if precision == torch.float16 else 1.0)
    for each, its_optimizer in ((model, optimizer), (copy, resumed)):
        run(each, its_optimizer, range(6, 12))
    for ours, theirs in zip(optimizer.masters, resumed.masters, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(UserError, match=r"matrix has an fp32 master, and this run trains in float32"):
        Optimizer(Small(), settings, 12).load(tmp_path)


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
    optimizer = Optimizer(model, OptimizerSection(learning_rate=0.1), 5)
    give_gradient(model, 0)
    optimizer.step()
    optimizer.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        Optimizer(Small(), OptimizerSection(learning_rate=0.1), 5).load(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_longer_run_goes_on_at_the_rate_where_its_schedule_ended(tmp_path: Path) -> None:
    settings = OptimizerSection(learning_rate=0.1, min_lr_ratio=0.2, warmup_steps=1)

    def rates(optimizer: Optimizer, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            for parameter in optimizer.parameters:
                parameter.grad = torch.ones_like(parameter)
            found.append(optimizer.step().learning_rate)
        return found

    first = Optimizer(Small(), settings, total_steps=5)
    began = rates(first, 5)
    assert began[-1] == pytest.approx(0.02)
    first.save(tmp_path)
    longer = Optimizer(Small(), settings, total_steps=9)
    longer.load(tmp_path)
    assert longer.note is not None
    assert rates(longer, 4) == [began[-1]] * 4
    longer.save(tmp_path)  # what is recorded stays the schedule that the run began with
    longest = Optimizer(Small(), settings, total_steps=12)
    longest.load(tmp_path)
    assert rates(longest, 3) == [began[-1]] * 3
    asked = Optimizer(Small(), settings.model_copy(update={"schedule_steps": 12}), total_steps=12)
    asked.load(tmp_path)
    assert rates(asked, 3) == [0.1 * learning_rate_factor(step, 12, 1, 0.2) for step in (9, 10, 11)]


def test_values_by_hand() -> None:
    # 4 steps of warm-up, then 5 of a half cosine from 1 down to 0.1.
    factors = [learning_rate_factor(step, 9, 4, 0.1) for step in range(9)]
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, *cosine])
    assert cosine[0] == 1.0
    assert cosine[2] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)


def test_without_warm_up_the_first_step_is_whole() -> None:
    assert learning_rate_factor(0, 10, 0, 0.0) == 1.0
    assert learning_rate_factor(9, 10, 0, 0.0) == pytest.approx(0.0)


def test_past_the_end_it_stays_at_the_floor() -> None:
    assert learning_rate_factor(500, 10, 2, 0.2) == pytest.approx(0.2)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (5, 5), (5, 4), (2, 10)])
def test_short_runs_do_not_divide_by_nothing(total: int, warmup: int) -> None:
    assert all(0 < learning_rate_factor(step, total, warmup, 0.1) <= 1 for step in range(total))


BEGAN = Schedule(total_steps=20, warmup_steps=4, min_lr_ratio=0.1)


def test_a_schedule_of_the_same_length_is_resumed_without_a_word() -> None:
    assert resumed_schedule(BEGAN.record(), BEGAN, asked=False, done=7, peak=1e-3) == (BEGAN, None)
    assert resumed_schedule(None, BEGAN, asked=False, done=7, peak=1e-3) == (BEGAN, None)


@pytest.mark.parametrize("steps", [12, 30])
def test_another_number_of_steps_leaves_the_schedule_as_it_was(steps: int) -> None:
    planned = Schedule(steps, 4, 0.1)
    schedule, note = resumed_schedule(BEGAN.record(), planned, asked=False, done=10, peak=1e-3)
    assert [schedule.factor(step) for step in range(20)] == [BEGAN.factor(step) for step in range(20)]
    assert [schedule.factor(step) for step in range(20, 30)] == [pytest.approx(0.1)] * 10
    assert note is not None
    assert "falling until optimizer step 20, and stays at 0.0001 after it" in note


def test_a_length_that_is_asked_for_is_taken_and_its_jump_is_named() -> None:
    planned = Schedule(36, 4, 0.1)
    schedule, note = resumed_schedule(BEGAN.record(), planned, asked=True, done=19, peak=1e-3)
    assert schedule == planned
    # The 15th of 31 steps after the warm-up: 0.1 + 0.9 * (1 + cos(15/31 pi)) / 2, and the last of the shorter schedule.
    assert note is not None
    assert note.endswith("(the run began with 20); the next step takes 0.000573 in place of 0.0001")
