"""A model that a client trains: an adapter over the base, with its gradient and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe.config.tables.model import OptimizerSection
from nmoe.errors import DivergenceError
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Objective, Outputs
from nmoe.learner.passes import scored_columns
from nmoe.model.config import Numerics
from nmoe.model.lora import ATTENTION, EXPERTS, MLP, Lora, LoraSettings, choose, refuse_high_rank, sites
from nmoe.model.peft_format import read_settings, resume_adapter, save_adapter
from nmoe.model.transformer import Transformer
from nmoe.serve.tinker.data import PassRequest
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.losses import batch_of, logprobs_of
from nmoe.serve.tinker.messages import message
from nmoe.serve.tinker.tensors import batched

# The scale of an update is ALPHA / rank, as in the adapters that Tinker's service hands out.
_ALPHA = 32.0
_TOKENS_PER_MICROBATCH = 8192


@dataclass(frozen=True)
class Base:
    """The checkpoint that all models share."""

    model: Transformer
    name: str
    directory: Path
    fingerprint: str

    @property
    def numerics(self) -> Numerics:
        return "exact" if self.model.exact else "fast"

    @property
    def numbers(self) -> str:
        """What the numbers of a model depend on beside its checkpoint: precision, device and numerics."""
        weight = self.model.head_weight
        return f"{str(weight.dtype).removeprefix('torch.')}, --device {weight.device.type} --numerics {self.numerics}"


@dataclass(frozen=True)
class Shape:
    """The adapter that a client asks for."""

    rank: int
    attention: bool = True
    mlp: bool = True
    seed: int = 0

    def settings(self, model: Transformer) -> LoraSettings:
        """Raises TinkerError for an adapter that changes nothing."""
        names = {site.target for site in sites(model)}
        wanted = {*(ATTENTION if self.attention else ()), *((*MLP, *EXPERTS) if self.mlp else ())}
        if not names & wanted:
            raise TinkerError("lora_config: train_attn and train_mlp are both false, so that there is nothing to train")
        return LoraSettings(self.rank, _ALPHA, targets=tuple(sorted(names & wanted)))


def new_lora(base: Base, shape: Shape) -> Lora:
    """Returns an adapter of this shape, attached to the base. Raises TinkerError or UserError for one that the base cannot have."""
    settings = shape.settings(base.model)
    chosen = choose(base.model, settings.targets)
    refuse_high_rank(base.model, chosen, settings.rank)
    return Lora(base.model, settings, chosen, str(base.directory), base.fingerprint)


def read_values(base: Base, directory: Path) -> tuple[Shape, list[Tensor]]:
    """Reads a saved adapter: its shape and its values. Raises UserError for a damaged one, and for one of another base."""
    shape = shape_of(directory)
    lora = new_lora(base, shape)
    lora.detach()
    resume_adapter(lora, directory)
    return shape, [parameter.detach() for parameter in lora.parameters()]


class TrainedModel:
    """An adapter under training. All methods run on the engine's thread, and leave the adapter detached."""

    def __init__(self, base: Base, shape: Shape, saved: Path | None = None, optimizer: bool = False) -> None:
        """Draws a new adapter, or reads the one that `save` wrote, without `optimizer` its weights alone. Raises TinkerError or
        UserError for one that the base cannot have, and for a directory that holds another shape or is damaged."""
        self.base, self.shape = base, shape
        self.lora = new_lora(base, shape)
        try:
            if saved is None:
                self.lora.initialize(shape.seed)
            else:
                resume_adapter(self.lora, saved)
            # Now: of weights in low precision it copies the values.
            settings = OptimizerSection(min_lr_ratio=1.0)
            self.learner = Learner(base.model, settings, 1, _TOKENS_PER_MICROBATCH, lora=self.lora)
            if saved is not None and optimizer:
                self.learner.optimizer.load(saved)
        finally:
            self.lora.detach()

    def run(self, request: PassRequest, objective: Objective) -> bytes:
        """Runs a pass; without `forward_only` adds the loss's gradient to the one accumulated since the last step. A pass that
        raises adds nothing."""
        batch = batch_of(request.data, request.loss)
        with self.lora.attached(), self.learner.optimizer.whole_gradient():
            if request.forward_only:
                logprobs_N = self.learner.logprobs(batch).result()
                loss, _ = objective(Outputs(logprobs_N, torch.zeros_like(logprobs_N)), scored_columns(batch))
                total = float(loss)
            else:
                result = self.learner.forward_backward(batch, objective).result()
                logprobs_N, total = result.tokens["logprobs"], result.loss
        reply = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
        reply.metrics["loss:sum"] = total
        record = reply.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(request.data))
        record.fields["logprobs"].CopyFrom(batched(logprobs_of(request.data, logprobs_N)))
        written: bytes = reply.SerializeToString()
        return written

    def step(self, params: Mapping[str, float]) -> dict[str, Any]:
        """Takes a step of AdamW on the accumulated gradient."""
        norm = params["grad_clip_norm"]
        self.learner.optimizer.change(
            OptimizerSection.model_construct(
                learning_rate=params["learning_rate"],
                beta1=params["beta1"],
                beta2=params["beta2"],
                eps=params["eps"],
                weight_decay=params["weight_decay"],
                max_grad_norm=norm if norm > 0 else float("inf"),
                min_lr_ratio=1.0,
            )
        )
        with self.lora.attached():
            try:
                result = self.learner.optim_step().result()
            except DivergenceError:
                # The client's next pass begins anew, and need not fail with this gradient.
                self.learner.optimizer.forget_gradient()
                raise
        return {"type": "optim_step", "metrics": result.metrics()}

    def values(self) -> list[Tensor]:
        """Returns the adapter's present values, which the next step changes."""
        return [parameter.detach() for parameter in self.lora.parameters()]

    def save(self, directory: Path) -> None:
        """Writes weights and optimizer into an existing directory."""
        self.learner.save(directory)

    def save_for_sampling(self, directory: Path) -> None:
        """Writes the weights, as PEFT loads them, into an existing directory."""
        save_adapter(self.lora, directory)


def shape_of(directory: Path) -> Shape:
    """Returns the shape of a saved adapter. Raises UserError for a directory that has none."""
    settings, _, raw = read_settings(directory)
    targets = {str(one).rpartition(".")[2] for one in raw.get("target_modules") or ()}
    mlp = bool(targets & set(MLP)) or bool(raw.get("target_parameters"))
    return Shape(settings.rank, bool(targets & set(ATTENTION)), mlp)
