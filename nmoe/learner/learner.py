"""The learner: owns the weights and the optimizer, and offers the primitives of training.

It knows no algorithm. A recipe gives it an objective and a batch, whose weights fix mask, reduction and denominator.
"""

# Shapes: T predicting positions, N scored positions, V vocabulary, Y layers, E experts, K chosen experts.

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
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
from nmoe.model.checkpoint import export_model, load_weights, refuse_packed, sharded_model, snapshot_model
from nmoe.model.head import Head
from nmoe.model.lora import Lora
from nmoe.model.ops.table import make_ready
from nmoe.model.peft_format import resume_adapter, save_adapter, snapshot_adapter
from nmoe.model.snapshot import Snapshot
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import collect, command, gang
from nmoe.parallel.ranks import Ranks, release, whole

if TYPE_CHECKING:
    from nmoe.parallel.sharded_files import ShardedFiles

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Future(Protocol[R_co]):
    """The result of a primitive, now or later. `result()` waits for it."""

    def result(self) -> R_co: ...


@dataclass(frozen=True)
class Done(Generic[R]):
    """The future of a primitive that ran at once, as every primitive of a single process does."""

    value: R

    def result(self) -> R:
        return self.value


class WeightReceiver(Protocol):
    """Any engine, as `publish` sees it."""

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None: ...

    async def update_weights(self, source: Transformer | Lora, version: int) -> None: ...


def share_model(
    model: Transformer, ranks: Ranks, device: torch.device | None = None, kept: Collection[nn.Parameter] = ()
) -> None:
    """Shards a model over the ranks in place and gives its experts their dispatcher; a model that they share already stays as it
    is. A model on meta names the `device` that its parts will be allocated on. The `kept` parameters stay whole on every rank.
    Raises UserError as `Ranks.shard` does."""
    if ranks.share(model):
        return
    moes = model.moe_layers()
    dispatcher = ranks.shard(model, model.blocks, moes, model.config.routed_experts, kept, device)
    for moe in moes:
        moe.dispatcher, moe.sharded = dispatcher, ranks.size > 1


class Learner:
    """Trains one model, or only its adapter if there is one, together with its head if there is one.

        >>> import nmoe
        >>> import torch
        >>> from nmoe.config.tables.model import OptimizerSection
        >>> from nmoe.learner.batch import Batch
        >>> from nmoe.learner.objectives import cross_entropy
        >>> learner = nmoe.Learner(nmoe.load_model(checkpoint), OptimizerSection(learning_rate=1e-2), 9, tokens_per_microbatch=512)
        >>> ids = torch.tensor([5, 6, 7, 8])
        >>> batch = Batch((3,), ids[:-1], ids[1:], scored_T=torch.ones(3, dtype=torch.bool), weights_T=torch.ones(3) / 3)
        >>> first = learner.forward_backward(batch, cross_entropy).result().loss
        >>> step = learner.optim_step().result()
        >>> learner.forward_backward(batch, cross_entropy).result().loss < first
        True

    It runs in one process or on all ranks of the default group of `torch.distributed`: each rank gets the same model, or its part
    of one that `share_model` sharded, and makes the same calls, runs a part of every batch, holds a part of the weights, and
    returns what one process would. Adapter and head are whole on every rank.

    `tokens_per_microbatch` bounds the memory of a pass and never changes a gradient. `temperature` is the sampling temperature, so
    that log-probabilities belong to the distribution that was sampled from. With `head_only` no pass computes the vocabulary, which
    separate critics, reward models and classifiers do not need. With a `head_learning_rate` the head learns at that rate, without
    weight decay.
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
        refuse_packed(model, "trained")
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
        """Adds the gradient of this batch to the gradient accumulated since the last `optim_step`."""
        return Done(joined(self.on_each_rank(partial(self._pass, objective), batch)))

    def on_each_rank(self, function: Callable[[MicroBatches], R], batch: Batch) -> list[R]:
        """Calls a function with each rank's micro-batches of the batch, on that rank; returns all results."""
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
        """Log-probabilities of the scored tokens under the present weights, `[N]`, in the batch's order."""
        return Done(in_order(self.on_each_rank(self._logprobs, batch)))

    def _logprobs(self, micros: MicroBatches) -> Scores:
        return forward_logprobs(self.model, micros, self.temperature)

    def head_outputs(self, batch: Batch) -> Future[Tensor]:
        """Outputs of the head at the scored tokens under the present weights, `[N, K]`, in the batch's order."""
        assert self.head is not None, "a learner without a head has no outputs of one"
        return Done(in_order(self.on_each_rank(self._head_outputs, batch)))

    def _head_outputs(self, micros: MicroBatches) -> Scores:
        assert self.head is not None, "a learner without a head has no outputs of one"
        return forward_head_outputs(self.model, self.head, micros)

    @command
    def optim_step(self) -> Future[StepResult]:
        """Clips, steps, moves the router biases (unless the base, which they belong to, is frozen), quantises experts that have a
        profile, advances the schedule and clears the gradient."""
        if self.ranks.size > 1:
            release(self.model)
            self.ranks.sum_gradients(self.optimizer.masters)  # FSDP sums the gradients of sharded parameters
            self.ranks.sum(self._load_YE)
        result = self.optimizer.step()
        if self._balanced_by_bias and not result.overflow:
            move_router_bias(self.model, self._load_YE)
        for moe in self._profiled:
            moe.quantise()
        self._load_YE.zero_()
        return Done(result)

    def publish(self, engine: WeightReceiver) -> Future[int]:
        """Hands the weights, or the adapter if only that is trained, to an engine under the next version, which is returned."""
        self.version += 1
        self.hand_over(engine)
        return Done(self.version)

    def hand_over(self, engine: WeightReceiver) -> None:
        """Hands an engine the weights under their present version, for example after `load`."""
        engine.run(engine.update_weights(self.lora or self.model, self.version))

    def save(self, directory: Path) -> dict[str, int]:
        """Writes the trained weights, a head included, and their optimizer into an existing directory. An adapter comes with a
        reference to its base, not with the base. Returns the rest of the state, for `load`."""
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
        """The state that `save` would write and return now. With `copied` it is a copy in host memory, to be written while training
        goes on. Every rank has to call this and then the snapshot's `start`, which a controller calls for all; the first one its
        `write`."""
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
    def export(self, directory: Path, format: Literal["hf", "peft"] = "hf") -> None:
        """Writes the weights for other software into an existing, empty directory: "hf" a Hugging Face checkpoint of the family
        that the model fits, with an adapter merged into its base; "peft" the adapter alone. The tokenizer is not part of it:
        `tokenizer.save(directory)` adds it. Raises UserError (`export_model`)."""
        if format == "peft":
            if self.ranks.rank == 0:
                assert self.lora is not None, "a learner of the whole model has no adapter"
                save_adapter(self.lora, directory)
        elif self.ranks.size > 1:
            release(self.model)
            export_model(self.model, directory, gather=self._gather(), first=self.ranks.rank == 0)
        else:
            with nullcontext(self.model) if self.lora is None else self.lora.merged() as model:
                export_model(model, directory)
        self.ranks.wait()

    def _gather(self) -> Callable[[str], Tensor]:
        """A function that returns a whole weight by its name, with the adapter's update. All ranks ask for the same ones. The last
        two are kept, because a checkpoint takes gate and up, then down, expert by expert."""
        state, updates = self.model.state_dict(), {} if self.lora is None else self.lora.updates()

        @lru_cache(maxsize=2)
        def gather(name: str) -> Tensor:
            tensor = whole(state[name].detach())
            return updates[name].merged(tensor) if name in updates else tensor

        return gather

    @command
    def load(self, directory: Path, state: Mapping[str, int] | None = None) -> None:
        """Loads the trained weights, their optimizer and, with the `state` that `save` returned, the version. Raises UserError if
        the base is no longer the one that the adapter was trained beside."""
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
