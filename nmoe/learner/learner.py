"""The learner: owns the weights and the optimizer, and offers the primitives of training.

It knows no algorithm. A recipe gives it an objective and a batch, whose weights fix mask, reduction and denominator.
"""

# Shapes: T predicting positions, N scored positions, V vocabulary, Y layers, E experts, K chosen experts.

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from nmoe.config.tables.optimizer import OptimizerSection
from nmoe.learner.batch import Batch
from nmoe.learner.forward import (
    Scores,
    Share,
    in_order,
    on_each_rank,
    score,
    scored_states,
    share_head_outputs,
    share_logprobs,
)
from nmoe.learner.objectives import Objective, Scored
from nmoe.learner.optimizer import TENSORS, Optimizer, StepResult
from nmoe.learner.routing import RoutingStatistics, auxiliary_loss, count_load, load_shares, move_router_bias
from nmoe.learner.sharding import share_model
from nmoe.model.checkpoint import export_model, load_weights, refuse_packed, sharded_model, snapshot_model
from nmoe.model.device import fetch, put
from nmoe.model.head import Head
from nmoe.model.lora import Lora
from nmoe.model.moe import RouterTrace
from nmoe.model.ops.table import make_ready
from nmoe.model.peft_format import resume_adapter, save_adapter, snapshot_adapter
from nmoe.model.snapshot import Snapshot
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import command, gang
from nmoe.parallel.ranks import Ranks, release, whole
from nmoe.parallel.traffic import Traffic

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


@dataclass(frozen=True)
class PassResult:
    """The result of one `forward_backward`.

    `tokens` holds one value per scored token in the order of the batch: `logprobs`, `entropy` and the statistics of the objective.
    `routing` is None in a dense model, `traffic` where no ranks share experts.
    """

    loss: float
    auxiliary_loss: float
    tokens: dict[str, Tensor]
    routing: RoutingStatistics | None
    traffic: Traffic | None = None

    def routing_metrics(self) -> dict[str, Any]:
        """Metrics of the routers and of shared experts, by the names of `docs/reference/metrics.md`; none for a dense model."""
        metrics: dict[str, Any] = {}
        if self.routing is not None:
            metrics |= {"router_aux_loss": self.auxiliary_loss, **self.routing.metrics()}
        if self.traffic is not None:
            metrics |= {"rdep_bytes": float(self.traffic.sent_bytes), "time_dispatch_s": self.traffic.seconds}
        return metrics


class Learner:
    """Trains one model, or only its adapter if there is one, together with its head if there is one.

        >>> import nmoe
        >>> import torch
        >>> from nmoe.config.tables.optimizer import OptimizerSection
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

    `tokens_per_microbatch` bounds the memory of a pass and never changes a gradient. `temperature` is that of sampling, so that
    log-probabilities are those of the distribution that was sampled from. With `head_only` no pass computes the vocabulary, which
    separate critics, reward models and classifiers do not need. With a `head_learning_rate` the head
    learns at that rate, without weight decay.
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
        assert lora is None or lora.model is model, "the adapter is that of the model that is trained"
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
        self._load_YE = self._no_load()
        # Without an adapter, of which every rank has all.
        self._files: ShardedFiles | None = None
        if self.ranks.size > 1 and lora is None:
            # Imported here because it takes 0.5 s, which only several ranks should cost.
            from nmoe.parallel.sharded_files import ShardedFiles

            self._files = ShardedFiles()

    def _no_load(self) -> Tensor:
        return torch.zeros(len(self.model.moe_layers()), self.model.config.experts, dtype=torch.int64)

    def forward_backward(self, batch: Batch, objective: Objective) -> Future[PassResult]:
        """Adds the gradient of this batch to the gradient accumulated since the last `optim_step`."""
        return Done(_joined(self._on_each_rank(partial(self._pass, objective), batch)))

    def _on_each_rank(self, function: Callable[[Share], R], batch: Batch) -> list[R]:
        return on_each_rank(function, batch, self.tokens_per_microbatch, self.ranks)

    def _pass(self, objective: Objective, share: Share) -> _Part:
        """Forward and backward passes of this rank's micro-batches."""
        config = self.model.config
        balancing = config.routed_experts > 0 and config.router_aux_loss_coef > 0
        # The auxiliary loss needs the shares of the whole batch before the first backward pass. If there is only one part, its own
        # forward pass gives them.
        alone = self.ranks.size == 1 and len(share.parts) == 1
        share_YE = self._load_shares(share) if balancing and not alone else None
        experts = config.routed_experts
        part = _Part(RoutingStatistics.empty(len(config.moe_layers), experts) if experts else None)
        dispatcher = next((moe.dispatcher for moe in self.model.moe_layers() if moe.dispatcher is not None), None)
        if dispatcher is not None:
            dispatcher.sent()  # of passes that computed log-probabilities alone
        for on_host, places_N, counts in share.parts:
            micro = on_host.to(self.model.device)
            trace = RouterTrace(replay=micro.routes_TYK)
            outputs = score(self.model, micro, trace, self.temperature, self.head, self.head_only)
            objective_sum, statistics = objective(outputs, scored_columns(micro))
            total = objective_sum
            sums = [objective_sum.detach()]
            if balancing:
                share_YE = load_shares(count_load(trace, config.experts)) if share_YE is None else share_YE
                extra = auxiliary_loss(trace, share_YE, share.tokens, config.router_aux_loss_coef)
                sums.append(extra.detach())
                total = total + extra
            (total * (self.optimizer.loss_scale * counts)).backward()
            if not counts:
                continue
            if not self.head_only:
                statistics |= {"logprobs": outputs.logprobs_N.detach(), "entropy": outputs.entropy_N.detach()}
            here = fetch(*sums, *statistics.values())
            part.loss += float(here[0])
            part.auxiliary_loss += sum(map(float, here[1 : len(sums)]))
            for name, values_N in zip(statistics, here[len(sums) :], strict=True):
                part.columns.setdefault(name, []).append(values_N)
            part.places.append(places_N)
            if part.routing is not None:
                self._load_YE += part.routing.add(trace)
        part.traffic = None if dispatcher is None else dispatcher.sent()
        return part

    @torch.no_grad()
    def _load_shares(self, share: Share) -> Tensor:
        """The share of the batch's router picks per layer and expert, `[Y, E]`, from recorded routes or, without them, from a
        forward pass of all parts. With the shares of one part alone, the gradient of the auxiliary loss would depend on how the
        batch is split."""
        load_YE = self._no_load()
        for on_host, _, counts in share.parts:
            trace = RouterTrace(replay=on_host.routes_TYK)
            if trace.replay is None:
                scored_states(self.model, on_host.to(self.model.device), trace)
            if counts:
                load_YE += fetch(count_load(trace, self.model.config.experts))[0]
        self.ranks.sum(load_YE)
        return load_shares(load_YE)

    def logprobs(self, batch: Batch) -> Future[Tensor]:
        """Log-probabilities of the scored tokens under the present weights, `[N]`, in the batch's order."""
        return Done(in_order(self._on_each_rank(self._share_logprobs, batch)))

    def _share_logprobs(self, share: Share) -> Scores:
        return share_logprobs(self.model, share, self.temperature)

    def head_outputs(self, batch: Batch) -> Future[Tensor]:
        """Outputs of the head at the scored tokens under the present weights, `[N, K]`, in the batch's order."""
        assert self.head is not None, "a learner without a head has no outputs of one"
        return Done(in_order(self._on_each_rank(self._share_head_outputs, batch)))

    def _share_head_outputs(self, share: Share) -> Scores:
        assert self.head is not None, "a learner without a head has no outputs of one"
        return share_head_outputs(self.model, self.head, share)

    @command
    def optim_step(self) -> Future[StepResult]:
        """Clips, steps, moves the router biases (unless the base, which they belong to, is frozen), quantises experts that have a
        profile, advances the schedule and clears the gradient."""
        release(self.model)
        self.ranks.sum_gradients(self.optimizer.masters)  # of those that are sharded FSDP does it
        result = self.optimizer.step()
        self.ranks.sum(self._load_YE)
        if not result.overflow and self.lora is None:
            move_router_bias(self.model, self._load_YE)
        for moe in self.model.moe_layers():
            moe.quantise()
        self._load_YE.zero_()
        return Done(result)

    def publish(self, engine: WeightReceiver) -> Future[int]:
        """Hands the weights, or the adapter if only that is trained, to an engine under the next version, which is returned."""
        self.version += 1
        self.hand_over(engine)
        return Done(self.version)

    def hand_over(self, engine: WeightReceiver) -> None:
        """Gives an engine the weights under their present version, as after `load`."""
        engine.run(engine.update_weights(self.lora or self.model, self.version))

    def save(self, directory: Path) -> dict[str, int]:
        """Writes what is trained, a head included, and its optimizer into an existing directory. An adapter comes with a reference
        to its base, not with the base. Returns the rest of the state, for `load`."""
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
        """What `save` would write and return now. With `copied` it is a copy in host memory, to be written while training goes on.
        Every rank has to call this and then the snapshot's `start`, which a controller calls for all; the first one its `write`."""
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
    def _start(self, place: Path) -> None:
        if self._files is not None:
            self._files.start(place)

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
        """Gives a weight whole, by its name and with the adapter's update. All ranks ask for the same ones. The last two are kept,
        because a checkpoint takes gate and up, then down, expert by expert."""
        state, updates = self.model.state_dict(), {} if self.lora is None else self.lora.updates()

        @lru_cache(maxsize=2)
        def gather(name: str) -> Tensor:
            tensor = whole(state[name].detach())
            return updates[name].merged(tensor) if name in updates else tensor

        return gather

    @command
    def load(self, directory: Path, state: Mapping[str, int] | None = None) -> None:
        """Takes what is trained, its optimizer and, with the `state` that `save` returned, the version. Raises UserError if the
        base is no longer the one that the adapter was trained beside."""
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


@dataclass
class _Part:
    """The results of one rank's micro-batches."""

    routing: RoutingStatistics | None
    loss: float = 0.0
    auxiliary_loss: float = 0.0
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    places: list[Tensor] = field(default_factory=list)
    traffic: Traffic | None = None


def _joined(parts: list[_Part]) -> PassResult:
    """Joins the ranks' parts into one result, with per-token columns in the batch's order."""
    order_N = torch.cat([place for part in parts for place in part.places]).argsort()
    names = next((part.columns for part in parts if part.columns), {})
    tokens = {name: torch.cat([v for part in parts for v in part.columns.get(name, [])])[order_N] for name in names}
    routing = parts[0].routing
    for part in parts[1:]:
        if routing is not None and part.routing is not None:
            routing.join(part.routing)
    counted = [part.traffic for part in parts if part.traffic is not None]
    return PassResult(
        loss=sum(part.loss for part in parts),
        auxiliary_loss=sum(part.auxiliary_loss for part in parts),
        tokens=tokens,
        routing=routing,
        traffic=reduce(Traffic.beside, counted) if counted else None,
    )


def scored_columns(micro: Batch) -> Scored:
    """What an objective reads of a micro-batch."""

    def column(values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else values_T[micro.scored_places]

    return Scored(
        weights_N=micro.weights_T[micro.scored_places],
        advantages_N=column(micro.advantages_T),
        behaviour_logprobs_N=column(micro.behaviour_logprobs_T),
        reference_logprobs_N=column(micro.reference_logprobs_T),
        old_logprobs_N=column(micro.old_logprobs_T),
        returns_N=column(micro.returns_T),
        old_values_N=column(micro.old_values_T),
        labels_N=column(micro.labels_T),
        label_weights_N=column(micro.label_weights_T),
        steps_N=column(micro.steps_T),
        sequence_N=put(micro.sequence_ids(), micro.scored_T.device)[micro.scored_places],
        pairs=micro.pairs,
    )
