"""Runs a rank's micro-batches through a model: forward and backward for training, or only forward to score tokens."""

# Shapes: T predicting positions, S those that run, N scored positions, D width, Y layers, K chosen experts or outputs of a head, E
# experts.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmoe.learner.batch import Batch, micro_batches
from nmoe.learner.objectives import Objective, Outputs, Scored
from nmoe.learner.routing import RoutingStatistics, auxiliary_loss, count_load, entropy_sums, load_shares
from nmoe.model.device import fetch, kind_of, put, return_gaps
from nmoe.model.head import Head
from nmoe.model.idle_threads import IDLE
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import Ranks
from nmoe.parallel.traffic import Traffic
from nmoe.work import WORK


class MicroBatch(NamedTuple):
    """The sequences that run through the model at once, held on the host, and the positions of their scored tokens in the whole
    batch, `[N]`. With `counts` False it is a repetition without effect on the result, which keeps a rank in step with the
    others."""

    batch: Batch
    positions_N: Tensor
    counts: bool


@dataclass(frozen=True)
class MicroBatches:
    """One rank's micro-batches, and the number of tokens of the whole batch.

    All ranks run equally many, since they gather the weights of a sharded model together. A rank that has fewer runs the smallest
    one again, with `counts` False.
    """

    parts: Sequence[MicroBatch]
    tokens: int


def deal(batch: Batch, tokens_per_microbatch: int, ranks: int) -> list[MicroBatches]:
    """Splits a batch into micro-batches and deals them to the ranks in turns; returns one `MicroBatches` per rank."""
    parts = []
    for sequences in micro_batches(batch, tokens_per_microbatch, ranks):
        micro, rows_T = batch.select(sequences)
        parts.append(MicroBatch(micro, rows_T[micro.scored_T], counts=True))
    idle = min(parts, key=lambda part: part.batch.tokens)._replace(counts=False)
    most = -(-len(parts) // ranks)
    dealt = [parts[rank::ranks] for rank in range(ranks)]
    return [MicroBatches([*own, *[idle] * (most - len(own))], batch.tokens) for own in dealt]


Scores = list[tuple[Tensor, Tensor]]
"""A list with an entry per micro-batch: values at its scored tokens, and these tokens' positions in the whole batch."""


@dataclass(frozen=True)
class PassResult:
    """The result of one `Learner.forward_backward`.

    `tokens` holds one value per scored token (token that the loss covers) in the order of the batch: the statistics of the
    objective and, unless the learner trains only its head, `logprobs` and `entropy`. `routing` is None for a dense model; `traffic`
    is None unless experts are spread over ranks.
    """

    loss: float
    auxiliary_loss: float
    tokens: dict[str, Tensor]
    routing: RoutingStatistics | None
    traffic: Traffic | None = None

    def routing_metrics(self) -> dict[str, Any]:
        """Returns the metrics of routers and of experts spread over ranks, by the names of `docs/reference/metrics.md`; empty for a
        dense model."""
        metrics: dict[str, Any] = {}
        if self.routing is not None:
            metrics |= {"router_aux_loss": self.auxiliary_loss, **self.routing.metrics()}
        if self.traffic is not None:
            metrics |= {"rdep_bytes": float(self.traffic.sent_bytes), "time_dispatch_s": self.traffic.seconds}
        return metrics


@dataclass
class RankResult:
    """The sums and per-token columns of one rank's micro-batches; `joined` combines all ranks' into a `PassResult`."""

    routing: RoutingStatistics | None
    loss: float = 0.0
    auxiliary_loss: float = 0.0
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    positions: list[Tensor] = field(default_factory=list)
    traffic: Traffic | None = None


class TrainingPass:
    """Runs forward and backward passes of a rank's micro-batches.

    The load-balancing loss needs, before the first backward pass, every expert's share of the router's picks over the whole batch.
    With the shares of only one micro-batch, its gradient would depend on how the batch is split.
    """

    def __init__(
        self, model: Transformer, ranks: Ranks, temperature: float, head: Head | None = None, head_only: bool = False
    ) -> None:
        config = model.config
        self.model, self.ranks, self.temperature = model, ranks, temperature
        self.head, self.head_only = head, head_only
        self.experts, self.layers, self.coefficient = (
            config.routed_experts,
            len(config.moe_layers),
            config.router_aux_loss_coef,
        )
        self.balancing = self.experts > 0 and self.coefficient > 0
        dispatchers = (moe.dispatcher for moe in model.moe_layers())
        self.dispatcher = next((one for one in dispatchers if one is not None), None)

    def run(self, micros: MicroBatches, objective: Objective, loss_scale: float) -> RankResult:
        """Adds the gradient of `loss_scale` times the loss (load-balancing loss included) to the parameters' gradients. Returns
        this rank's summed losses, without `loss_scale`, its values per token and its routing statistics."""
        # If there is only one micro-batch, its own forward pass gives the shares.
        alone = self.ranks.size == 1 and len(micros.parts) == 1
        share_YE = self._load_shares(micros) if self.balancing and not alone else None
        result = RankResult(RoutingStatistics.empty(self.layers, self.experts) if self.experts else None)
        if self.dispatcher is not None:
            self.dispatcher.sent()  # of passes that computed log-probabilities alone
        for on_host, positions_N, counts in micros.parts:
            micro = on_host.to(self.model.device)
            trace = RouterTrace(replay=micro.routes_TYK)
            outputs = score(self.model, micro, trace, self.temperature, self.head, self.head_only)
            objective_sum, statistics = objective(outputs, scored_columns(micro))
            total = objective_sum
            sums = [objective_sum.detach()]
            if self.balancing:
                share_YE = load_shares(count_load(trace, self.experts)) if share_YE is None else share_YE
                extra = auxiliary_loss(trace, share_YE, micros.tokens, self.coefficient)
                sums.append(extra.detach())
                total = total + extra
            (total * (loss_scale * counts)).backward()
            if self.experts and kind_of(self.model.device).on_host:
                # Here, where no activation lives: at the end of a pass its gaps were larger than the activations.
                return_gaps()
            if not counts:
                continue
            if not self.head_only:
                statistics |= {"logprobs": outputs.logprobs_N.detach(), "entropy": outputs.entropy_N.detach()}
            routed = [] if result.routing is None else [count_load(trace, self.experts), entropy_sums(trace)]
            # The host waits once for all of them.
            here = fetch(*sums, *routed, *statistics.values())
            result.loss += float(here[0])
            result.auxiliary_loss += sum(map(float, here[1 : len(sums)]))
            for name, values_N in zip(statistics, here[len(sums) + len(routed) :], strict=True):
                result.columns.setdefault(name, []).append(values_N)
            result.positions.append(positions_N)
            if result.routing is not None:
                result.routing.add(trace, *here[len(sums) : len(sums) + len(routed)])
        result.traffic = None if self.dispatcher is None else self.dispatcher.sent()
        return result

    @torch.no_grad()
    def _load_shares(self, micros: MicroBatches) -> Tensor:
        """Computes each expert's share of its layer's picks in the whole batch, `[Y, E]`, from recorded routes or, without them,
        from a forward pass of all micro-batches."""
        load_YE = torch.zeros(self.layers, self.experts, dtype=torch.int64)
        for on_host, _, counts in micros.parts:
            trace = RouterTrace(replay=on_host.routes_TYK)
            if trace.replay is None:
                scored_states(self.model, on_host.to(self.model.device), trace)
            if counts:
                load_YE += fetch(count_load(trace, self.experts))[0]
        self.ranks.sum(load_YE)
        return put(load_shares(load_YE), self.model.device)


def joined(results: Sequence[RankResult]) -> PassResult:
    """Combines the results of all ranks into one, with per-token columns in the batch's order."""
    order_N = torch.cat([positions_N for one in results for positions_N in one.positions]).argsort()
    names = next((one.columns for one in results if one.columns), {})
    tokens = {name: torch.cat([v for one in results for v in one.columns.get(name, [])])[order_N] for name in names}
    routing = results[0].routing
    for one in results[1:]:
        if routing is not None and one.routing is not None:
            routing.join(one.routing)
    counted = [one.traffic for one in results if one.traffic is not None]
    return PassResult(
        loss=sum(one.loss for one in results),
        auxiliary_loss=sum(one.auxiliary_loss for one in results),
        tokens=tokens,
        routing=routing,
        traffic=reduce(Traffic.beside, counted) if counted else None,
    )


def scored_states(model: Transformer, micro: Batch, trace: RouterTrace) -> Tensor:
    """Runs the model and returns the final hidden states of the scored tokens, `[N, D]`. Records the routers' choices for all
    tokens of the micro-batch in `trace`. A prefix that sequences share runs once, with the routes recorded for the first of them if
    routes are recorded."""
    device = micro.inputs_T.device
    WORK.pieces += 1
    if kind_of(device).on_host:
        IDLE.look()
    positions_T = put(micro.positions(), device)
    if (shared := micro.shared_rows()) is None:
        attend = PackedAttention(micro.lengths, device, model.exact)
        states_TD: Tensor = model(micro.inputs_T, positions_T, attend, trace)
        return states_TD[micro.scored_positions]
    rows_S, row_T = shared
    attend = PackedAttention(micro.lengths, device, model.exact, shared)
    run = RouterTrace(replay=None if trace.replay is None else trace.replay[rows_S])
    states_SD: Tensor = model(micro.inputs_T[rows_S], positions_T[rows_S], attend, run)
    trace.chosen_TK += [chosen_SK[row_T] for chosen_SK in run.chosen_TK]
    trace.scores_TE += [scores_SE[row_T] for scores_SE in run.scores_TE]
    trace.biases_E += run.biases_E
    return states_SD[row_T[micro.scored_positions]]


def score(
    model: Transformer,
    micro: Batch,
    trace: RouterTrace,
    temperature: float,
    head: Head | None = None,
    head_only: bool = False,
) -> Outputs:
    """Runs the model and returns the log-probabilities and entropies of the scored tokens, and the head's outputs. The
    probabilities are over the tokens that top-k or top-p left when the token was sampled, if the batch records them, else over the
    vocabulary. With `head_only` it computes no vocabulary logits, and the first two are NaN."""
    states_ND = scored_states(model, micro, trace)
    head_NK = None if head is None else head(states_ND, model.exact)
    if head_only:
        nan_N = torch.full(states_ND.shape[:1], torch.nan, device=states_ND.device)
        return Outputs(nan_N, nan_N, head_NK)
    kept_NM = None if micro.kept_TM is None else micro.kept_TM[micro.scored_positions]
    targets_N = micro.targets_T[micro.scored_positions]
    logprobs_N, entropy_N = head_logprobs(states_ND, model.head_weight, targets_N, temperature, kept_NM, model.exact)
    return Outputs(logprobs_N, entropy_N, head_NK)


@torch.no_grad()
def forward_logprobs(model: Transformer, micros: MicroBatches, temperature: float) -> Scores:
    """Computes the log-probabilities of a rank's scored tokens, without gradient; replays recorded routes if the batch has them."""
    found = []
    for micro, positions_N, counts in micros.parts:
        on_device = micro.to(model.device)
        logprobs_N = score(model, on_device, RouterTrace(replay=on_device.routes_TYK), temperature).logprobs_N.cpu()
        if counts:
            found.append((logprobs_N, positions_N))
    return found


@torch.no_grad()
def forward_head_outputs(model: Transformer, head: Head, micros: MicroBatches) -> Scores:
    """Computes a head's outputs at a rank's scored tokens, without gradient; replays recorded routes if the batch has them."""
    found = []
    for micro, positions_N, counts in micros.parts:
        on_device = micro.to(model.device)
        states_ND = scored_states(model, on_device, RouterTrace(replay=on_device.routes_TYK))
        if counts:
            found.append((head(states_ND, model.exact).cpu(), positions_N))
    return found


def in_order(found: Sequence[Scores]) -> Tensor:
    """Joins the scores of all ranks into one tensor, in the order of the batch."""
    parts = [part for rank in found for part in rank]
    return torch.cat([scores for scores, _ in parts])[torch.cat([positions_N for _, positions_N in parts]).argsort()]


def batch_logprobs(model: Transformer, batch: Batch, tokens_per_microbatch: int, temperature: float) -> Tensor:
    """Computes the log-probabilities of the batch's scored tokens, `[N]`, in the batch's order, with a model that only this process
    runs."""
    (micros,) = deal(batch, tokens_per_microbatch, 1)
    return in_order([forward_logprobs(model, micros, temperature)])


def batch_head_outputs(model: Transformer, head: Head, batch: Batch, tokens_per_microbatch: int) -> Tensor:
    """Computes a head's outputs at the batch's scored tokens, `[N, K]`, in the batch's order, with a model that only this process
    runs."""
    (micros,) = deal(batch, tokens_per_microbatch, 1)
    return in_order([forward_head_outputs(model, head, micros)])


def scored_columns(micro: Batch) -> Scored:
    """Selects the scored tokens from the columns of a micro-batch, as an objective takes them."""

    def column(values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else values_T[micro.scored_positions]

    return Scored(
        weights_N=micro.weights_T[micro.scored_positions],
        advantages_N=column(micro.advantages_T),
        behaviour_logprobs_N=column(micro.behaviour_logprobs_T),
        reference_logprobs_N=column(micro.reference_logprobs_T),
        old_logprobs_N=column(micro.old_logprobs_T),
        returns_N=column(micro.returns_T),
        old_values_N=column(micro.old_values_T),
        labels_N=column(micro.labels_T),
        label_weights_N=column(micro.label_weights_T),
        steps_N=column(micro.steps_T),
        sequence_N=put(micro.sequence_ids(), micro.scored_T.device)[micro.scored_positions],
        pairs=micro.pairs,
    )
