"""AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101), and Muon for matrices (`nmoe.learner.muon`), with global-norm clipping and
a learning-rate schedule, saved without pickling. Weight decay applies to matrices only, never to norms or biases.

The model keeps its weights in low precision, as the engine that shares them needs, and they are too coarse to train: the spacing of
bf16, 2^-8 of a weight, is far above a learning rate. The optimizer therefore holds fp32 master copies, accumulates their gradients
in fp32, and writes the result of each step back (Micikevicius et al. 2017, arXiv:1710.03740, section 3.1). In fp16 small gradients
would vanish, so the loss is scaled by a power of two. The scale halves when a gradient overflows, in which case the step is
skipped, and doubles after a number of good steps (section 3.2).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nmoe.config.tables.model import OptimizerSection
from nmoe.errors import DivergenceError, UserError
from nmoe.learner.muon import Muon, hidden_matrices
from nmoe.learner.schedule import Schedule, resumed_schedule
from nmoe.model.device import on_own_pages
from nmoe.model.snapshot import Snapshot, hold
from nmoe.parallel.ranks import clip, like, local, own_part, sharded_as, total_norm, whole
from nmoe.parsing import json_of


class AdamW:
    """PyTorch's fused AdamW kernel with its state. Each of `param_groups` has `params` (on several ranks, this rank's parts), `lr`
    and `weight_decay`. `state` has the tensors `step`, `exp_avg` and `exp_avg_sq` of every parameter that was updated."""

    def __init__(self, groups: Iterable[dict[str, Any]], beta1: float, beta2: float, eps: float) -> None:
        self.param_groups = list(groups)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Updates in place all parameters that have a gradient."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.moments(parameter) for parameter in params]
            adamw(
                params,
                [parameter.grad for parameter in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                maximize=False,
            )

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns the state of a parameter, zeros if it was never updated."""
        if not self.state.get(parameter):
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[parameter]


# The files of its state.
TENSORS, SETTINGS = "optimizer.safetensors", "optimizer.json"

# As in torch.amp.GradScaler.
FIRST_LOSS_SCALE = 2.0**16
GROWTH_STEPS = 2000


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. `grad_norm` is measured before clipping. `loss_scale` is None except in fp16. `overflow`
    means that the scaled fp16 gradient was not finite: no step was taken and `grad_norm` is None."""

    grad_norm: float | None
    learning_rate: float
    loss_scale: float | None = None
    overflow: bool = False

    def metrics(self) -> dict[str, float]:
        """Returns the step's metrics by the names of `docs/reference/metrics.md`. `grad_norm` is missing after an overflow."""
        metrics = {"learning_rate": self.learning_rate}
        if self.grad_norm is not None:
            metrics["grad_norm"] = self.grad_norm
        if self.loss_scale is not None:
            metrics |= {"loss_scale": self.loss_scale, "overflow": float(self.overflow)}
        return metrics


class Optimizer:
    """Trains the trainable parameters of a model, and of its head if it has one; `steps` counts the steps taken. The learning-rate
    schedule has `total_steps` unless the settings name another length. With a `head_learning_rate` the head learns at that rate,
    without weight decay. The caller has to multiply a loss by `loss_scale` before its backward pass."""

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSection,
        total_steps: int,
        head: nn.Module | None = None,
        head_learning_rate: float | None = None,
    ) -> None:
        self.settings = settings
        self.schedule = Schedule(settings.schedule_steps or total_steps, settings.warmup_steps, settings.min_lr_ratio)
        self.note: str | None = None
        self.steps = 0
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if head is not None:
            trained |= {f"own_head.{name}": parameter for name, parameter in head.named_parameters()}
        self.names, self.parameters = list(trained), list(trained.values())
        self._gradients = MasterGradients()
        self.masters = [self._gradients.master_of(parameter) for parameter in self.parameters]
        self.scaled = any(parameter.dtype == torch.float16 for parameter in self.parameters)
        self.loss_scale = FIRST_LOSS_SCALE if self.scaled else 1.0
        self.good_steps = 0
        self.stepped = [own_part(master) for master in self.masters]
        own = len(list(head.parameters())) if head is not None and head_learning_rate is not None else 0
        body, of_head = self.stepped[: len(self.stepped) - own], self.stepped[len(self.stepped) - own :]
        peak = settings.learning_rate
        # The biases of a layer's experts are stacked into a matrix, which is still a bias.
        decays = [p.dim() >= 2 and not name.endswith("bias") for name, p in zip(self.names, body, strict=False)]
        self.muon = self._muon(model, settings)
        by_adamw = [(p, d) for p, d in zip(body, decays, strict=True) if self.muon is None or p not in self.muon]
        groups: list[dict[str, Any]] = [
            {
                "params": [p for p, d in by_adamw if d],
                "weight_decay": settings.weight_decay,
                "peak": peak,
                "decays": True,
            },
            {
                "params": [p for p, d in by_adamw if not d],
                "weight_decay": 0.0,
                "peak": peak,
                "decays": False,
            },
            {"params": of_head, "weight_decay": 0.0, "peak": head_learning_rate},
        ]
        parts = [group for group in groups if group["params"]]
        self.adamw = AdamW(parts, settings.beta1, settings.beta2, settings.eps)

    def _muon(self, model: nn.Module, settings: OptimizerSection) -> Muon | None:
        """Returns Muon for the model's hidden matrices, if the settings ask for it and any are trained."""
        if settings.kind == "adamw":
            return None
        matrices = hidden_matrices(model)
        trained = [(mine, master, matrices[name]) for name, _, master, mine in self._all() if name in matrices]
        group = {"weight_decay": settings.weight_decay, "peak": settings.learning_rate, "decays": True}
        return Muon(trained, settings.momentum, group) if trained else None

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [*self.adamw.param_groups, *([] if self.muon is None else self.muon.param_groups)]

    def _trains(self, mine: Tensor) -> AdamW | Muon:
        """Returns what updates a parameter."""
        return self.muon if self.muon is not None and mine in self.muon else self.adamw

    def change(self, settings: OptimizerSection) -> None:
        """Takes other settings from the next step on; the moments stay. The length of the schedule stays, too, and a head's own
        rate."""
        self.settings = settings
        self.schedule = replace(self.schedule, warmup_steps=settings.warmup_steps, min_lr_ratio=settings.min_lr_ratio)
        self.adamw.beta1, self.adamw.beta2, self.adamw.eps = settings.beta1, settings.beta2, settings.eps
        if self.muon is not None:
            self.muon.momentum = settings.momentum
        for group in self._groups:
            if "decays" in group:
                group["peak"] = settings.learning_rate
                group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0

    def step(self) -> StepResult:
        """Takes one step with gradient clipping, and clears the gradient. A step whose fp16 gradient overflowed is skipped,
        and halves the loss scale. Returns the gradient norm and the learning rate (`StepResult`).

        Raises DivergenceError, with the weights unchanged, if the gradient is not finite for another reason than the loss scale.
        """
        settings = self.settings
        factor = self.schedule.factor(self.steps)
        for group in self._groups:
            group["lr"] = group["peak"] * factor
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if (
                master is not parameter and parameter.grad is not None
            ):  # sharded: FSDP sets its gradient without the hook
                self._gradients.move(master, parameter)
        scale = self.loss_scale
        if scale != 1.0:
            for master in self.masters:
                if master.grad is not None:
                    master.grad.div_(scale)
        norm = total_norm([master.grad for master in self.masters if master.grad is not None])
        grad_norm = float(norm)
        if not grad_norm < float("inf"):
            if not self.scaled or scale <= 1.0:
                raise DivergenceError(self._diagnosis(grad_norm))
            self.loss_scale, self.good_steps = scale / 2, 0
            self.forget_gradient()
            return StepResult(None, settings.learning_rate * factor, scale, overflow=True)
        clip(self.masters, settings.max_grad_norm, norm)
        for mine, master in zip(self.stepped, self.masters, strict=True):
            if mine is not master:  # FSDP may have moved what this rank holds, to pad it
                mine.data, mine.grad = local(master.detach()), None if master.grad is None else local(master.grad)
        self.adamw.step()
        if self.muon is not None:
            self.muon.step()
        self.forget_gradient()
        self._write_back()
        self.steps += 1
        if not self.scaled:
            return StepResult(grad_norm, settings.learning_rate * factor)
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.loss_scale, self.good_steps = scale * 2, 0
        return StepResult(grad_norm, settings.learning_rate * factor, scale)

    @contextmanager
    def whole_gradient(self) -> Iterator[None]:
        """Puts the accumulated gradient back if the `with` block raises: a pass that breaks off has added a part. For
        parameters that are not sharded."""
        before = [None if master.grad is None else master.grad.clone() for master in self.masters]
        try:
            yield
        except BaseException:
            self.forget_gradient()
            for parameter, master, gradient in zip(self.parameters, self.masters, before, strict=True):
                parameter.grad = None
                master.grad = gradient
            raise

    def forget_gradient(self) -> None:
        """Clears the gradient, as after a step."""
        for tensor in (*self.masters, *self.stepped):
            tensor.grad = None
        self._gradients.free()

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def _diagnosis(self, grad_norm: float) -> str:
        bad = [
            name
            for name, master in zip(self.names, self.masters, strict=True)
            if master.grad is not None and not bool(whole(master.grad).isfinite().all())
        ]
        where = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        found = f"the gradient of {where} is not finite" if bad else f"the gradient's norm is {grad_norm}"
        return (
            f"optimizer step {self.steps + 1}: {found}; no step was taken and the weights are as they were. Training "
            "diverged: resume from the last checkpoint with a lower optimizer.learning_rate"
        )

    def save(self, directory: Path) -> None:
        """Writes the optimizer's state into `directory`."""
        self.snapshot(copied=False).write(directory)

    def snapshot(self, copied: bool) -> Snapshot:
        """Returns the state that `save` would write now, for parameters that are not sharded. With `copied` later steps do not
        change it."""
        held, size = hold(self.tensors(), copied)
        settings = self.settings_snapshot()

        def write(directory: Path) -> None:
            on_host = {name: tensor.cpu().contiguous() for name, tensor in held.items()}
            save_file(on_host, directory / TENSORS)
            settings.write(directory)

        return Snapshot(write, size)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the moments and the fp32 master copy of each parameter as `{"parameter/key": tensor}`, sharded as the
        parameter is."""
        tensors: dict[str, Tensor] = {}
        for name, parameter, master, mine in self._all():
            # After a step all have moments, also a parameter without a gradient so far, so that a lost one is noticed.
            trains = self._trains(mine)
            moments = trains.moments(mine) if self.steps else trains.state.get(mine, {})
            states = {key: sharded_as(value, master) for key, value in moments.items()}
            if master is not parameter:
                states["master"] = master.detach()
            tensors |= {f"{name}/{key}": value for key, value in states.items()}
        return tensors

    def settings_snapshot(self) -> Snapshot:
        """Returns the rest of the state, all but the tensors: step counts, loss scale and schedule, written as JSON."""
        state = {
            "steps": self.steps,
            "loss_scale": self.loss_scale,
            "good_steps": self.good_steps,
            "schedule": self.schedule.record(),
        }

        def write(directory: Path) -> None:
            (directory / SETTINGS).write_text(json.dumps(state) + "\n")

        return Snapshot(write)

    def load(self, directory: Path) -> None:
        """Loads the state that `save` wrote, and continues its learning-rate schedule (see `resumed_schedule`; `note` is its line
        for the user, or None). Raises UserError for a missing or torn file, for a run in another precision, and if the state of a
        parameter is missing."""
        settings = self.settings
        try:
            stored = safe_open(directory / TENSORS, "pt")
            state = json_of((directory / SETTINGS).read_text())
            self.steps, self.good_steps = int(state["steps"]), int(state["good_steps"])
            self.loss_scale = float(state["loss_scale"])
            asked, peak = settings.schedule_steps > 0, settings.learning_rate
            self.schedule, self.note = resumed_schedule(state.get("schedule"), self.schedule, asked, self.steps, peak)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{directory}: its optimizer state is missing or torn: {error}") from None
        keys: dict[str, list[str]] = defaultdict(list)
        for path in stored.keys():  # noqa: SIM118 - not a mapping
            name, _, key = path.rpartition("/")
            keys[name].append(key)
        for name, parameter, master, mine in self._all():
            # One tensor at a time, of which a rank keeps its part.
            states = {key: like(stored.get_tensor(f"{name}/{key}").to(master.device), master) for key in keys[name]}
            low = master is not parameter
            if low != ("master" in states):
                precision = str(parameter.dtype).removeprefix("torch.")
                raise UserError(
                    f"{directory / TENSORS}: {name} {'has no' if low else 'has an'} fp32 master, and this "
                    f"run trains in {precision}; resume with the model.precision that the run began with"
                )
            if low:
                master.data.copy_(states.pop("master"))
            if not states and self.steps:
                raise UserError(f"{directory / TENSORS}: no state for parameter {name}")
            trains = self._trains(mine)
            if states and ("momentum" in states) != isinstance(trains, Muon):
                kind = "muon" if "momentum" in states else "adamw"
                raise UserError(
                    f'{directory / TENSORS}: {name} was trained by another optimizer; resume with optimizer.kind = "{kind}"'
                )
            trains.state[mine] = {key: local(value) for key, value in states.items()}

    def _all(self) -> Iterable[tuple[str, Tensor, Tensor, Tensor]]:
        """Returns for each trained parameter its name, the parameter, its master (see `MasterGradients`), and this rank's part of
        the master."""
        return zip(self.names, self.parameters, self.masters, self.stepped, strict=True)


class MasterGradients:
    """The fp32 masters of bf16 and fp16 parameters, which the optimizer updates, and their gradients, to which hooks move the
    parameters' gradients.

    The gradients of a step lie in one buffer, made with the first of them. Allocated one by one they stood between the activations
    of the backward pass and kept them from the gaps: of the 10.1 GB of a mixture of 373M weights 2.5 GB were gaps. The buffer has
    separate pages, because the activations of the next step took parts of the gap that it left otherwise: a model of 135M weights
    held 0.5 GB more after each of its first steps, 8.3 GB in the end.
    """

    def __init__(self) -> None:
        self._places: dict[Tensor, int] = {}  # where each master's gradient begins in the buffer
        self._size = 0
        self._buffer: Tensor | None = None

    def master_of(self, parameter: Tensor) -> Tensor:
        """Returns the tensor that the optimizer updates for a parameter: itself, or for bf16 and fp16 an fp32 copy."""
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        master = parameter.detach().float().requires_grad_()
        if type(master) is Tensor:  # not sharded
            self._places[master] = self._size
            self._size += master.numel()
        parameter.register_post_accumulate_grad_hook(partial(self.move, master))
        return master

    def move(self, master: Tensor, parameter: Tensor) -> None:
        """Adds a parameter's gradient to its master's, and clears it."""
        assert parameter.grad is not None, "a gradient was accumulated"
        if master.grad is not None:
            master.grad += parameter.grad
        elif (start := self._places.get(master)) is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            if self._buffer is None:
                self._buffer = on_own_pages(self._size, master.device)
            gradient = self._buffer[start : start + master.numel()].view_as(master)
            master.grad = gradient.copy_(parameter.grad)
        parameter.grad = None

    def free(self) -> None:
        """Frees the buffer, once no master has a gradient."""
        self._buffer = None
