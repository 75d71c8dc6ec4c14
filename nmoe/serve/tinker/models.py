"""A model that a client trains: its weights, with their gradient and their optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmoe.config.tables.model import OptimizerSection
from nmoe.errors import DivergenceError
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Objective, Outputs
from nmoe.learner.passes import scored_columns
from nmoe.model.lora import Lora
from nmoe.model.transformer import Transformer
from nmoe.serve.tinker.data import PassRequest
from nmoe.serve.tinker.losses import batch_of, logprobs_of
from nmoe.serve.tinker.messages import message
from nmoe.serve.tinker.tensors import batched
from nmoe.serve.tinker.weights import Base, Shape, attached, new_weights, read_into, save_for_sampling, tensors_of

_TOKENS_PER_MICROBATCH = 8192


@contextmanager
def _unbalanced(model: Transformer) -> Iterator[None]:
    """Leaves out the balancing of experts: a client's loss is all that is trained on. Only while a learner is made, so that saved
    models keep the base's settings."""
    config = model.config
    model.config = config.model_copy(update={"router_aux_loss_coef": 0.0, "router_bias_rate": 0.0})
    try:
        yield
    finally:
        model.config = config


class TrainedModel:
    """Weights under training. All methods run on the engine's thread, and leave an adapter detached."""

    def __init__(self, base: Base, shape: Shape, saved: Path | None = None, optimizer: bool = False) -> None:
        """Begins at the base, with a drawn adapter unless the whole model is trained, or at what `save` wrote, without `optimizer`
        at its weights alone. Raises TinkerError or UserError for an adapter that the base cannot have, and for a directory that
        holds another shape or is damaged."""
        self.base, self.shape = base, shape
        self.weights = new_weights(base, shape)
        lora = self.weights if isinstance(self.weights, Lora) else None
        if saved is not None:
            read_into(self.weights, saved)
        elif lora is not None:
            lora.initialize(shape.seed)
        with attached(self.weights) as model, _unbalanced(model):
            if lora is None:
                model.requires_grad_(True)
            # Now: of weights in low precision it copies the values.
            settings = OptimizerSection(min_lr_ratio=1.0)
            self.learner = Learner(model, settings, 1, _TOKENS_PER_MICROBATCH, lora=lora)
            if saved is not None and optimizer:
                self.learner.optimizer.load(saved)

    def run(self, request: PassRequest, objective: Objective) -> bytes:
        """Runs a pass; without `forward_only` adds the loss's gradient to the one accumulated since the last step. A pass that
        raises adds nothing."""
        batch = batch_of(request.data, request.loss)
        with attached(self.weights), self.learner.optimizer.whole_gradient():
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
        with attached(self.weights):
            try:
                result = self.learner.optim_step().result()
            except DivergenceError:
                # The client's next pass begins anew, and need not fail with this gradient.
                self.learner.optimizer.forget_gradient()
                raise
        return {"type": "optim_step", "metrics": result.metrics()}

    def values(self) -> list[Tensor]:
        """Returns the present values, which the next step changes."""
        return tensors_of(self.weights)

    def save(self, directory: Path) -> None:
        """Writes weights and optimizer into an existing directory."""
        self.learner.save(directory)

    def save_for_sampling(self, directory: Path) -> None:
        """Writes the weights for other programs into an existing directory."""
        save_for_sampling(self.base, self.weights, directory)
