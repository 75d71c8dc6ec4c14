"""Takes the optimizer steps of a training step, for the policy and its critic, and measures how far they moved the policy.

The importance ratios that the update's passes report are measured before each optimizer step. With one update a step, the default,
they are 1 on every token and say nothing of how far the update went. So a few sequences are scored once more when the updates are
done: at most `MOST_TOKENS` trained tokens, and at most `SHARE` of the positions that a pass over the batch computes. If already the
first sequence is longer, only its beginning is scored, up to that share or until it has `LEAST_TOKENS` trained tokens: a prompt
longer than the share is therefore scored whole. On the speedrun this takes under 2% of a step (`benchmarks/watching.py`). Nothing
of the run depends on it.
"""

# Shapes: T predicting positions, N scored ones of the batch, M those that are measured, B sequences.

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from nmoe.config.tables.algorithm import AlgorithmSection, BatchSection
from nmoe.config.tables.rollout import SamplingSection
from nmoe.envs.pools.pool import stable_hash
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Objective, Outputs
from nmoe.learner.objectives.base import LOG_RATIO_CLAMP, need
from nmoe.learner.objectives.divergence import kl_estimate
from nmoe.learner.optimizer import StepResult
from nmoe.learner.passes import PassResult, scored_columns
from nmoe.parallel.traffic import Traffic
from nmoe.rl.correction import weights_by, with_correction
from nmoe.rl.critic import Critic
from nmoe.rl.experience import Experience, minibatches, policy_batch
from nmoe.rl.policy import own_loss, policy_objective
from nmoe.rl.reference import Reference
from nmoe.trajectory import Trajectory

MOST_TOKENS = 2048
LEAST_TOKENS = 32
SHARE = 1 / 32


class PolicyUpdate:
    """Takes the optimizer steps of a training step, for the policy and its critic."""

    def __init__(
        self,
        learner: Learner,
        algorithm: AlgorithmSection,
        sampling: SamplingSection,
        *,
        sizes: BatchSection | None = None,
        seed: int = 0,
        reference: Reference | None = None,
        critic: Critic | None = None,
        older: bool = False,
        taught: bool = False,
    ) -> None:
        """Builds the objective of the policy and keeps the settings. `sizes` sets the number of optimizer steps per training step,
        by default 1; `seed` decides how groups are dealt to them. With `older`, samples may be of older weights than the
        learner's, as their versions say. With `taught`, a teacher's advantages compare it with the learner before the updates."""
        self.learner, self.algorithm = learner, algorithm
        self.reference, self.critic = reference, critic
        self._constant_length, self._sizes, self._seed = sampling.max_new_tokens, sizes or BatchSection(), seed
        self._several, self._older = self._sizes.updates > 1, older
        self._corrects = algorithm.correction != "none"
        self._scores_first = self._several or (taught and self._corrects)
        self._objective = with_correction(policy_objective(algorithm, critic), algorithm)
        self._policy_loss, self._loss = policy_objective(algorithm), own_loss(algorithm)

    def batch(self, samples: Sequence[Trajectory]) -> Batch:
        """Packs the samples into a batch, with the columns that advantages and losses need: the log-probabilities under the
        reference, if there is one; under the learner before the updates, if there are several updates, or a teacher beside a
        correction; and the critic's values, if there is a critic."""
        algorithm = self.algorithm
        version = self.learner.version if self._older else None
        batch = policy_batch(samples, None, algorithm.aggregation, self._constant_length, version)
        if self.reference is not None:
            batch = batch.with_reference(self.reference.logprobs(batch))
        # After the first of several updates the learner is no longer the sampler; ratios are to the learner before all of them.
        if self._scores_first:
            batch = replace(batch, old_logprobs_T=batch.column(self.learner.logprobs(batch).result()))
        return batch if self.critic is None else self.critic.with_values(batch)

    def update(
        self, step: int, experience: Experience | None, tokens: dict[str, Tensor] | None = None
    ) -> dict[str, float]:
        """Takes the optimizer steps of a training step and returns their metrics; does nothing and returns an empty dict if
        `experience` is None. While only the critic is trained, the policy takes no step.

        If the policy takes a step, `tokens` receives columns of the batch's scored tokens, `[N]` each: log-probability before the
        first update, entropy if there is only one, and the derivative of the loss by the log-probability."""
        if experience is None:
            return {}
        metrics = experience.metrics
        trains_policy = self.critic is None or not self.critic.warming_up(step)
        passes, steps = [], []
        deal = self._sizes, self.algorithm.aggregation, self._constant_length, self._seed, step
        for minibatch in minibatches(experience, *deal) if self._several else (experience.batch,):
            if self.critic is not None:
                self.critic.update(minibatch)
            if trains_policy:
                passes.append(self.learner.forward_backward(minibatch, self._objective).result())
                steps.append(self.learner.optim_step().result())
                if self.critic is not None:
                    self.critic.observe_policy(minibatch, passes[-1])
        if trains_policy:
            result, last = joined_passes(passes), joined_steps(steps)
            # Of a single update its own pass has them.
            batch, before_T = experience.batch, experience.batch.old_logprobs_T
            before_N = result.tokens["logprobs"] if before_T is None else before_T[batch.scored_positions]
            mismatch_N, weighed = result.tokens["log_ratio"], batch
            if before_T is not None or self._corrects:
                mismatch_N = before_N - _behaviour(batch)
            if self._corrects:
                weighed, corrected = self._weighed(batch, before_N)
                metrics |= corrected
            engines_N = None if batch.engines_T is None else batch.engines_T[batch.scored_positions]
            metrics |= update_metrics(result, last, experience.advantages, mismatch_N, engines_N)
            if batch.versions_T is not None:
                metrics = {k: v for k, v in metrics.items() if not k.startswith(("mismatch_", "route_"))}
                metrics |= mismatch_of_fresh(batch, mismatch_N, engines_N, self.learner.version)
            if batch.reference_logprobs_T is not None:
                metrics |= tails("reference", before_N - batch.reference_logprobs_T[batch.scored_positions])
            metrics |= effect(self.learner, weighed, before_N, self._loss, self._seed, step)
            if tokens is not None:
                tokens |= self.token_columns(experience, before_N, None if self._several else result.tokens["entropy"])
        if self.critic is not None:
            metrics |= self.critic.metrics(experience.batch)
        return metrics

    def token_columns(self, experience: Experience, logprobs_N: Tensor, entropy_N: Tensor | None) -> dict[str, Tensor]:
        """Returns the columns of scored tokens that a step records, from their log-probabilities before the first update and their
        entropies, if all are of one distribution."""
        entropies_N = torch.zeros_like(logprobs_N) if entropy_N is None else entropy_N
        batch = experience.batch
        if self._corrects:
            batch, _ = self._weighed(batch, logprobs_N)
        found = {
            "logprob": logprobs_N,
            "advantage": need(batch.advantages_T, "advantages")[batch.scored_positions],
            "gradient": loss_gradient(self._policy_loss, batch, logprobs_N, entropies_N),
        }
        return found if entropy_N is None else found | {"entropy": entropy_N}

    def _weighed(self, batch: Batch, before_N: Tensor) -> tuple[Batch, dict[str, float]]:
        """Returns the batch with the advantages that the update multiplied, and the metrics of their weights."""
        sequence_N = batch.sequence_ids()[batch.scored_positions]
        weights = weights_by(self.algorithm, before_N, _behaviour(batch), sequence_N)
        advantages_N = weights.weigh(need(batch.advantages_T, "advantages")[batch.scored_positions])
        weighed = replace(batch, old_logprobs_T=batch.column(before_N), advantages_T=batch.column(advantages_N))
        return weighed, weights.metrics()


def _behaviour(batch: Batch) -> Tensor:
    return need(batch.behaviour_logprobs_T, "behaviour_logprobs")[batch.scored_positions]


def loss_gradient(objective: Objective, batch: Batch, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
    """Returns the derivative of a policy loss by the log-probability of each scored token of the batch, `[N]`."""
    leaf_N = logprobs_N.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss, _ = objective(Outputs(leaf_N, entropy_N), scored_columns(batch))
        (gradient_N,) = torch.autograd.grad(loss, leaf_N)
    return gradient_N


def joined_passes(passes: Sequence[PassResult]) -> PassResult:
    """Joins the passes of several updates into one result: all tokens, mean losses, and all router picks."""
    if len(passes) == 1:
        return passes[0]
    routing = passes[0].routing
    for other in passes[1:]:
        if routing is not None and other.routing is not None:
            routing.join(other.routing)
    counted = [result.traffic for result in passes if result.traffic is not None]
    return PassResult(
        loss=sum(result.loss for result in passes) / len(passes),
        auxiliary_loss=sum(result.auxiliary_loss for result in passes) / len(passes),
        tokens={name: torch.cat([result.tokens[name] for result in passes]) for name in passes[0].tokens},
        routing=routing,
        traffic=reduce(Traffic.then, counted) if counted else None,
    )


def joined_steps(steps: Sequence[StepResult]) -> StepResult:
    """Joins the results of several optimizer steps into one: the last one's learning rate and loss scale, the largest gradient
    norm, and whether any overflowed."""
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    return replace(steps[-1], grad_norm=max(norms) if norms else None, overflow=any(step.overflow for step in steps))


def update_metrics(
    result: PassResult,
    step: StepResult,
    advantages: Tensor,
    mismatch_N: Tensor | None = None,
    engines_N: Tensor | None = None,
) -> dict[str, float]:
    """Computes the metrics of a training step's updates. `mismatch_N` is the log ratio of the learner before the updates to the
    sampler; if it is not given, the update's own log ratio is. `engines_N` is the number of the engine server that sampled each
    token, of several."""
    log_ratio_N = result.tokens["log_ratio"].double()
    advantages = advantages.double()
    clamped_N = log_ratio_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    entropy_N = result.tokens["entropy"].double()
    mismatch_N = log_ratio_N if mismatch_N is None else mismatch_N.double()
    metrics = {
        "loss": result.loss,
        "ppo_kl": float(-log_ratio_N.mean()),
        "ppo_clip_ratio": float(result.tokens["clipped"].double().mean()),
        "log_ratio_raw_max": float(log_ratio_N.max()),
        "log_ratio_max": float(clamped_N.max()),
        "log_ratio_min": float(clamped_N.min()),
        "ratio_max": float(clamped_N.max().exp()),
        "log_ratio_abs_p99": _quantile(log_ratio_N.abs(), 0.99),
        "tokens_in_batch": float(log_ratio_N.numel()),
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std(correction=0)),
        "advantage_min": float(advantages.min()),
        "advantage_max": float(advantages.max()),
        "entropy_mean": float(entropy_N.mean()),
        "entropy_p10": _quantile(entropy_N, 0.1),
        "entropy_p90": _quantile(entropy_N, 0.9),
        **_mismatch(mismatch_N, engines_N),
    }
    if "reference_kl" in result.tokens:
        metrics["reference_kl"] = float(result.tokens["reference_kl"].double().mean())
    return metrics | step.metrics() | result.routing_metrics()


def _mismatch(mismatch_N: Tensor, engines_N: Tensor | None) -> dict[str, float]:
    metrics = {
        "mismatch_abs_mean": float(mismatch_N.abs().mean()),
        "mismatch_abs_max": float(mismatch_N.abs().max()),
        # KL(sampler || learner) at the sampler's tokens: k3 with d = log sampler - log learner.
        "mismatch_kl": float(kl_estimate(-mismatch_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), "k3").mean()),
    }
    for engine in () if engines_N is None else engines_N.unique().tolist():
        metrics[f"mismatch_abs_mean/engine_{engine}"] = float(mismatch_N[engines_N == engine].abs().mean())
    return metrics


def mismatch_of_fresh(batch: Batch, mismatch_N: Tensor, engines_N: Tensor | None, version: int) -> dict[str, float]:
    """Computes the mismatch of a batch with older samples over the tokens that the learner's own `version` sampled: apart from
    others the "mixed" ones, which follow tokens of older weights in their sequence. Without such tokens there are no metrics."""
    assert batch.versions_T is not None, "not all tokens are of one version"
    positions_N = batch.scored_positions
    own_N, sequences_N = batch.versions_T[positions_N] == version, batch.sequence_ids()[positions_N]
    older_S = torch.zeros(len(batch.lengths), dtype=torch.bool)
    older_S[sequences_N[~own_N]] = True
    mixed_N = own_N & older_S[sequences_N]
    fresh_N, found = own_N & ~mixed_N, dict[str, float]()
    if fresh_N.any():
        found = _mismatch(mismatch_N[fresh_N].double(), None if engines_N is None else engines_N[fresh_N])
    if mixed_N.any():
        mixed = mismatch_N[mixed_N].double().abs()
        found |= {"mismatch_mixed_abs_mean": float(mixed.mean()), "mismatch_mixed_abs_max": float(mixed.max())}
    return found


def effect(
    learner: Learner, batch: Batch, before_N: Tensor, loss: Objective | None, seed: int, step: int
) -> dict[str, float]:
    """Measures how far the updates of a step moved the policy, as metrics. `batch` is the batch that they trained on, with
    advantages, and `before_N` its log-probabilities before the first update. `update_clip_ratio` is the share of tokens that `loss`
    would clip in another update; it is missing if `loss` is None."""
    part = measured(replace(batch, old_logprobs_T=batch.column(before_N)), seed, step)
    after_M = learner.logprobs(part).result()
    assert part.old_logprobs_T is not None, "given above"
    log_ratio_M = (after_M - part.old_logprobs_T[part.scored_positions]).double()
    clamped_M = log_ratio_M.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    found = {
        **tails("update", log_ratio_M),
        "update_ratio_max": float(clamped_M.max().exp()),
        # k3 with d = log before - log after. Of tokens that an update was just fitted to, the mean of d may be negative.
        "update_kl": float(kl_estimate(-clamped_M, "k3").mean()),
        "update_tokens": float(len(log_ratio_M)),
    }
    if loss is not None:
        _, statistics = loss(Outputs(after_M, torch.zeros_like(after_M)), scored_columns(part))
        found["update_clip_ratio"] = float(statistics["clipped"].double().mean())
    return found


def tails(name: str, log_ratio_N: Tensor) -> dict[str, float]:
    """Returns the extremes of the log ratio between two policies as metrics: highest and lowest, not clamped, and the 99th
    percentile of the absolute value."""
    sorted_N = log_ratio_N.double().abs().sort().values
    return {
        f"{name}_log_ratio_max": float(log_ratio_N.max()),
        f"{name}_log_ratio_min": float(log_ratio_N.min()),
        f"{name}_log_ratio_abs_p99": float(sorted_N[round(0.99 * (len(sorted_N) - 1))]),
    }


def measured(batch: Batch, seed: int, step: int) -> Batch:
    """Selects the part of a batch that `effect` scores: whole sequences in an order drawn from seed and step, up to the limits. If
    already the first exceeds them, only its beginning: as many positions as they allow, with at least `LEAST_TOKENS` trained tokens
    if it has so many."""
    rows = batch.shared_rows()
    positions = SHARE * (batch.tokens if rows is None else len(rows[0]))
    trained_B = torch.bincount(batch.sequence_ids()[batch.scored_positions], minlength=len(batch.lengths)).tolist()
    order = [sequence for sequence, trained in enumerate(trained_B) if trained]
    random.Random(stable_hash("effect", seed, step)).shuffle(order)
    chosen: list[int] = []
    tokens = ran = 0
    for sequence in order:
        tokens, ran = tokens + trained_B[sequence], ran + batch.lengths[sequence]
        if chosen and (tokens > MOST_TOKENS or ran > positions):
            break
        chosen.append(sequence)
    part, _ = batch.select(sorted(chosen))
    if len(chosen) > 1:
        return part
    positions_M = part.scored_positions
    count = min(len(positions_M), MOST_TOKENS, max(int((positions_M < positions).sum()), LEAST_TOKENS))
    return part.beginning(int(positions_M[count - 1]) + 1)


def _quantile(values_N: Tensor, q: float) -> float:
    # torch.quantile refuses more than 2^24 values; a sort does not.
    sorted_N = values_N.sort().values
    return float(sorted_N[round(q * (sorted_N.numel() - 1))])
