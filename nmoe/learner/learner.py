"""The learner: owns the weights and the optimizer, and offers the primitive operations of training (gradient, step, save, publish).

It knows no algorithm. A recipe gives it an objective and a batch, whose weights fix mask, reduction and denominator.
"""

# Shapes: T predicting positions, N scored positions, V vocabulary, Y layers, E experts, K chosen experts.

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from nmoe.config.tables.model import OptimizerSection
from nmoe.learner.batch import Batch
from nmoe.learner.objectives import Objective
from nmoe.learner.optimizer import TENSORS, Optimizer, StepResult
from nmoe.learner.passes import (
    MicroBatches,
    PassResult,
    RankResult,
    Scores,
    TrainingPass,
    deal,
    forward_head_outputs,
    forward_logprobs,
    in_order,
    joined,
)
from nmoe.learner.routing import move_router_bias
from nmoe.model.checkpoint import (
    checkpoint_tensors,
    export_model,
    load_weights,
    packed_form,
    refuse_packed,
    sharded_model,
    snapshot_model,
)
from nmoe.model.head import Head
from nmoe.model.lora import Lora
from nmoe.model.ops.table import make_ready
from nmoe.model.peft_format import resume_adapter, save_adapter, snapshot_adapter
from nmoe.model.snapshot import Snapshot
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import collect, command, gang
from nmoe.parallel.ranks import Ranks, offloads, release, whole

if TYPE_CHECKING:
    from nmoe.parallel.sharded_files import ShardedFiles

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Future(Protocol[R_co]):
    """The result of a learner operation that may still run; `result()` waits for it."""

    def result(self) -> R_co: ...


@dataclass(frozen=True)
class Done(Generic[R]):
    """A future whose value is already there: the operation ran before it returned, as every operation of a single process does."""

    value: R

    def result(self) -> R:
        return self.value


class WeightReceiver(Protocol):
    """The part of an inference engine's interface that `Learner.publish` uses."""

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None: ...

    async def update_weights(self, source: Transformer | Lora, version: int) -> None: ...


def share_model(
    model: Transformer, ranks: Ranks, device: torch.device | None = None, kept: Collection[nn.Parameter] = ()
) -> torch.device:
    """Shards a model over the ranks in place, and gives its expert layers the dispatcher that exchanges tokens between ranks. Does
    nothing for a model that is sharded already. A model on the meta device needs the `device` that it will compute on. Returns the
    device that the parts belong on: that one, or the CPU if they are offloaded. The `kept` parameters and packed experts stay whole
    on every rank. Raises UserError as `Ranks.shard` does."""
    where = model.device if device is None else device
    parts = torch.device("cpu") if offloads(ranks.parallel, ranks.size, where.type) else where
    if ranks.share(model):
        return parts
    moes = model.moe_layers()
    divided = model.config.routed_experts if packed_form(model) is None else 0
    dispatcher = ranks.shard(model, model.blocks, moes, divided, kept, device)
    for moe in moes:
        moe.dispatcher, moe.sharded = dispatcher, ranks.size > 1
    return parts


class Learner:
    """Trains one model (only the LoRA adapter, if it has one), together with a value, reward or classification head if there is
    one.

        >>> import nmoe
        >>> import torch
        >>> from nmoe.config.tables.model import OptimizerSection
        >>> from nmoe.learner.batch import Batch
        >>> from nmoe.learner.objectives import cross_entropy
        >>> optimizer = OptimizerSection(learning_rate=1e-2)
        >>> learner = nmoe.Learner(nmoe.load_model(checkpoint), optimizer, total_steps=9, tokens_per_microbatch=512)
        >>> ids = torch.tensor([5, 6, 7, 8])
        >>> batch = Batch((3,), ids[:-1], ids[1:], scored_T=torch.ones(3, dtype=torch.bool), weights_T=torch.ones(3) / 3)
        >>> first = learner.forward_backward(batch, cross_entropy).result().loss
        >>> step = learner.optim_step().result()
        >>> learner.forward_backward(batch, cross_entropy).result().loss < first
        True

    It runs in one process or on all ranks of the default group of `torch.distributed`. Each rank gets the same model, or its part
    of a model that `share_model` sharded, and makes the same calls; it runs a part of every batch, holds a part of the weights, and
    returns the same results as a single process would. Adapter and head are whole on every rank.

    `tokens_per_microbatch` bounds the memory of a pass and never changes a gradient. `temperature` is the sampling temperature, so
    that log-probabilities belong to the distribution that was sampled from. With `head_only` no pass computes vocabulary logits,
    which separate critics, reward models and classifiers do not need. With a `head_learning_rate` the head learns at that rate,
    without weight decay.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: OptimizerSection,
        total_steps: int,
        tokens_per_microbatch: int,
        temperature: float = 1.0,
        lora: Lora | None = None,
        ranks: Ranks | None = None,
        head: Head | None = None,
        head_only: bool = False,
        head_learning_rate: float | None = None,
    ) -> None:
        if lora is None:
            refuse_packed(model, "trained without an adapter")
        assert head is not None or not head_only, "a learner of a head alone has one"
        assert lora is None or lora.model is model, "the adapter belongs to the trained model"
        self.model, self.lora, self.head, self.head_only = model, lora, head, head_only
        make_ready(model.device)
        if head is not None:
            head.to(model.device)
        self.ranks = ranks or Ranks()
        if head_only and model.head is not None:
            model.head.requires_grad_(False)  # it never runs, and would be a parameter without a gradient
        share_model(model, self.ranks, kept=[] if lora is None else lora.parameters())
        self.optimizer = Optimizer(model, optimizer, total_steps, head, head_learning_rate)
        self.tokens_per_microbatch = tokens_per_microbatch
        self.temperature = temperature
        self.version = 0
        self.ahead = 0  # optimizer steps since the weights were handed over to an engine
        self._training_pass = TrainingPass(model, self.ranks, temperature, head, head_only)
        moes = model.moe_layers()
        self._load_YE = torch.zeros(len(moes), model.config.experts, dtype=torch.int64)
        self._balanced_by_bias = lora is None and model.config.router_bias_rate > 0
        self._profiled = [moe for moe in moes if moe.profile is not None]
        # Without an adapter, of which every rank has all.
        self._files: ShardedFiles | None = None
        if self.ranks.size > 1 and lora is None:
            # Imported here because it takes 0.5 s, which only several ranks should cost.
            from nmoe.parallel.sharded_files import ShardedFiles

            self._files = ShardedFiles()

    def forward_backward(self, batch: Batch, objective: Objective) -> Future[PassResult]:
        """Runs the model on a batch and adds the objective's gradient to the gradient accumulated since the last `optim_step`.
        Returns loss and statistics (`PassResult`)."""
        return Done(joined(self.on_each_rank(partial(self._pass, objective), batch)))

    def on_each_rank(self, function: Callable[[MicroBatches], R], batch: Batch) -> list[R]:
        """Splits a batch into micro-batches, calls a function on every rank with that rank's micro-batches, and returns the results
        of all ranks."""
        dealt = deal(batch, self.tokens_per_microbatch, self.ranks.size)
        if len(dealt) == 1:
            return [function(dealt[0])]
        if gang().leads:
            return collect(function, dealt)
        # All ranks are here, each with the whole batch.
        return self.ranks.gather(function(dealt[self.ranks.rank]))

    def _pass(self, objective: Objective, micros: MicroBatches) -> RankResult:
        result = self._training_pass.run(micros, objective, self.optimizer.loss_scale)
        if result.routing is not None:
            self._load_YE += result.routing.load_YE
        return result

    def logprobs(self, batch: Batch) -> Future[Tensor]:
        """Computes the log-probabilities of the scored tokens (the tokens that the loss covers) under the present weights, `[scored
        tokens]`, in the batch's order."""
        return Done(in_order(self.on_each_rank(self._logprobs, batch)))

    def _logprobs(self, micros: MicroBatches) -> Scores:
        return forward_logprobs(self.model, micros, self.temperature)

    def head_outputs(self, batch: Batch) -> Future[Tensor]:
        """Computes the head's outputs at the scored tokens (the tokens that the loss covers) under the present weights, `[scored
        tokens, outputs]`, in the batch's order."""
        assert self.head is not None, "a learner without a head has no outputs of one"
        return Done(in_order(self.on_each_rank(self._head_outputs, batch)))

    def _head_outputs(self, micros: MicroBatches) -> Scores:
        assert self.head is not None, "a learner without a head has no outputs of one"
        return forward_head_outputs(self.model, self.head, micros)

    @command
    def optim_step(self) -> Future[StepResult]:
        """Takes an optimizer step on the accumulated gradient: clips it, updates the weights, moves the routers' load-balancing
        biases (not a frozen base's), requantises experts with a quantisation profile, advances the learning-rate schedule and
        clears the gradient. After an overflow in fp16 it only halves the loss scale and clears the gradient. Returns the gradient
        norm and the learning rate (`StepResult`). Raises DivergenceError as `Optimizer.step` does."""
        if self.ranks.size > 1:
            release(self.model)
            self.ranks.sum_gradients(self.optimizer.masters)  # FSDP sums the gradients of sharded parameters
            self.ranks.sum(self._load_YE)
        result = self.optimizer.step()
        self.ahead += 1
        if self._balanced_by_bias and not result.overflow:
            move_router_bias(self.model, self._load_YE)
        for moe in self._profiled:
            moe.quantise()
        self._load_YE.zero_()
        return Done(result)

    def publish(self, engine: WeightReceiver) -> Future[int]:
        """Sends the weights, or only the adapter if that is trained, to an inference engine under the next version number, which it
        returns."""
        self.version += 1
        self.hand_over(engine)
        return Done(self.version)

    def hand_over(self, engine: WeightReceiver) -> None:
        """Sends the weights to an inference engine under their present version number, for example after `load`."""
        self.ahead = 0
        engine.run(engine.update_weights(self.lora or self.model, self.version))

    def save(self, directory: Path) -> dict[str, int]:
        """Writes the trained weights (a head included) and the optimizer state into an existing directory. For an adapter it writes
        a reference to the base model, not the base. Returns the remaining state, to be passed to `load`."""
        snapshot = self.snapshot(copied=False)
        snapshot.start(directory / ".parts")
        if self.ranks.rank == 0:
            snapshot.write(directory)
        if not gang().leads:
            self.ranks.wait()
        state: dict[str, int] = snapshot.state
        return state

    @command
    def snapshot(self, copied: bool) -> Snapshot:
        """Returns the state that `save` would write now, to be written later. With `copied` it is a copy in host memory, which can
        be written while training goes on. Every rank has to call this and then the snapshot's `start` (a controller calls both for
        all ranks); only the first rank calls `write`."""
        state = {"version": self.version}
        if self._files is not None:
            release(self.model)
            files, settings = sharded_model(self.model)
            size = self._files.hold({**files, TENSORS: self.optimizer.tensors()}, copied)
            # Twice, since the parts lie on the disk until they are joined.
            parts = [Snapshot(self._files.finish, 2 * size), settings, self.optimizer.settings_snapshot()]
        elif self.ranks.rank == 0:
            trained = snapshot_model(self.model, copied) if self.lora is None else snapshot_adapter(self.lora, copied)
            parts = [trained, self.optimizer.snapshot(copied)]
        else:
            parts = []
        if self.head is not None:
            parts.append(self.head.snapshot(copied))

        def write(directory: Path) -> None:
            for part in parts:
                part.write(directory)

        return Snapshot(write, sum(part.size for part in parts), state, self._start)

    @command
    def _start(self, directory: Path) -> None:
        if self._files is not None:
            self._files.start(directory)

    @command
    def export(self, directory: Path, format: Literal["hf", "nmoe", "peft"] = "hf") -> None:
        """Writes the weights for other software into an existing, empty directory. Format "hf" is a Hugging Face checkpoint of the
        model family that fits, with an adapter merged into its base; "nmoe" is the same for nmoe alone, which stores every model;
        "peft" is the adapter without the base. The tokenizer is not included: `tokenizer.save(directory)` adds it. Raises UserError
        as `export_model` does."""
        if format == "peft":
            if self.ranks.rank == 0:
                assert self.lora is not None, "a learner of the whole model has no adapter"
                save_adapter(self.lora, directory)
        elif self.ranks.size > 1:
            release(self.model)
            export_model(
                self.model,
                directory,
                gather=self._gather(),
                first=self.ranks.rank == 0,
                own_format=format == "nmoe",
            )
        else:
            with nullcontext(self.model) if self.lora is None else self.lora.merged() as model:
                export_model(model, directory, own_format=format == "nmoe")
        self.ranks.wait()

    def weights(self, format: Literal["hf", "nmoe"] = "hf") -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that `export` would write, with their names, for an engine in another process. One tensor is gathered
        at a time, by all ranks together: on a controller the other ranks gather while it iterates, which it has to do to the end.
        Raises UserError as `export_model` does."""
        release(self.model)
        tensors = checkpoint_tensors(self.model, self._gather(), own_format=format == "nmoe")
        with gang().meanwhile(partial(self._gather_all, format)):
            yield from ((name, make()) for name, _, make in tensors)

    def _gather_all(self, format: Literal["hf", "nmoe"]) -> None:
        for _ in self.weights(format):
            pass

    def _gather(self) -> Callable[[str], Tensor]:
        """Returns a function that collects a weight from all ranks by its name and merges the adapter's update. All ranks have to
        ask for the same weights. The last two are cached, because a checkpoint takes gate and up, then down, expert by expert."""
        state, updates = self.model.state_dict(), {} if self.lora is None else self.lora.updates()

        @lru_cache(maxsize=2)
        def gather(name: str) -> Tensor:
            tensor = whole(state[name].detach())
            return updates[name].merged(tensor) if name in updates else tensor

        return gather

    @command
    def load(self, directory: Path, state: Mapping[str, int] | None = None) -> None:
        """Loads the trained weights and the optimizer state from a directory that `save` wrote and, with the `state` that `save`
        returned, the version number. Raises UserError if the base model differs from the one that the adapter was trained on, and
        as `Optimizer.load` does."""
        if self.lora is not None:
            resume_adapter(self.lora, directory)
        else:
            release(self.model)
            load_weights(self.model, directory)
        if self.head is not None:
            self.head.load_weights(directory)
        self.optimizer.load(directory)
        if state is not None:
            self.version = state["version"]
