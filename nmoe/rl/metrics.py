"""The numbers of a policy-gradient step, by the names that `docs/reference/metrics.md` documents."""

# Shapes: N scored tokens, B samples.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from nmoe.envs.grade import COMPONENTS
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.conversation import ConversationTask
from nmoe.envs.tasks.text import OpenTask
from nmoe.learner.objectives.base import LOG_RATIO_CLAMP
from nmoe.learner.objectives.divergence import kl_estimate
from nmoe.learner.optimizer import StepResult
from nmoe.learner.passes import PassResult
from nmoe.parallel.traffic import Traffic
from nmoe.trajectory import Trajectory
from nmoe.types import FAILURES


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards and rates over all judged samples of the step, including those of dropped groups; lengths and failures over all
    samples. Raises RuntimeError where none was judged."""
    everything, trajectories = trajectories, [t for t in trajectories if t.trainable]
    failures = Counter(t.grade.failure for t in everything)
    if not trajectories:
        raise RuntimeError(f"every sample of the step was lost to the infrastructure: {dict(failures)}")
    rewards_B = torch.tensor([t.grade.score for t in trajectories], dtype=torch.float64)
    metrics = {f"reward_{name}": value for name, value in _moments(rewards_B).items()}
    metrics["reward_p90"] = float(rewards_B.quantile(0.9))
    for name in trajectories[0].grade.extras:
        metrics[name] = _mean([t.grade.extras[name] for t in trajectories])
    metrics["truncated"] = metrics.pop("truncated_response")
    for name in sorted({name for t in trajectories for name in t.grade.weights.keys() - set(COMPONENTS)}):
        values = [t.grade.components[name] for t in trajectories if name in t.grade.components]
        metrics[f"reward_left_out/{name}"] = 1 - len(values) / len(trajectories)
        if values:
            metrics[f"reward/{name}"] = _mean(values)
        if any(t.grade.cached for t in trajectories):
            metrics[f"reward_cached/{name}"] = _mean([name in t.grade.cached for t in trajectories])
    # An answer to an open problem is neither right nor wrong, so it has no correctness.
    metrics.pop("correctness")
    closed = [t for t in trajectories if not isinstance(TASKS[t.problem.task_type], OpenTask)]
    if closed:
        metrics["correctness"] = _mean([t.grade.extras["correctness"] for t in closed])
        wrong = [t for t in closed if t.grade.extras["correctness"] == 0]
        rewarded = [t for t in wrong if t.grade.score > metrics["reward_mean"]]
        metrics["rewarded_but_wrong"] = len(rewarded) / len(closed)
        # What shapes the way to right answers, such as a tenth for the format, is no high reward.
        high = [t for t in rewarded if t.grade.score > t.grade.weights.get("correctness", 0.0) / 2]
        metrics["high_reward_but_wrong"] = len(high) / len(closed)
    metrics["response_length_mean"] = _mean([t.sampled_tokens for t in everything])
    metrics["grader_error_rate"] = failures["grader_error"] / len(everything)
    metrics["turns_mean"] = _mean([len(t.turns) for t in everything])
    if any(isinstance(TASKS[t.problem.task_type], ConversationTask) for t in everything):
        metrics["branches_mean"] = _mean([len(t.branches) for t in everything])
    metrics["tool_calls_mean"] = _mean([len(t.tool_events) for t in everything])
    for source in sorted({t.problem.source for t in closed}):
        metrics[f"correctness/{source}"] = _mean(
            [t.grade.extras["correctness"] for t in closed if t.problem.source == source]
        )
    sources = sorted({t.problem.source for t in trajectories})
    for source in sources if len(sources) > 1 else ():
        metrics[f"format_ok/{source}"] = _mean(
            [t.grade.extras["format_ok"] for t in trajectories if t.problem.source == source]
        )
    for group in sorted({group for t in closed for group in t.problem.groups}):
        metrics[f"correctness/{group}"] = _mean(
            [t.grade.extras["correctness"] for t in closed if group in t.problem.groups]
        )
    layers = Counter(t.grade.verdict.layer for t in everything if t.grade.verdict is not None)
    metrics |= {f"settled/{layer}": count / layers.total() for layer, count in sorted(layers.items())}
    calls = Counter(event.failure for t in everything for event in t.tool_events)
    metrics |= {f"failures/{name}": float(failures[name]) for name in FAILURES if failures[name]}
    return metrics | {f"tool_failures/{name}": float(calls[name]) for name in FAILURES if calls[name] and name != "ok"}


def joined_passes(passes: Sequence[PassResult]) -> PassResult:
    """Joins the passes of several updates into one: all tokens, mean losses, and all router picks."""
    if len(passes) == 1:
        return passes[0]
    routing = passes[0].routing
    for other in passes[1:]:
        if routing is not None and other.routing is not None:
            routing.join(other.routing)
    counted = [result.traffic for result in passes if result.traffic is not None]
    return PassResult(
        loss=_mean([result.loss for result in passes]),
        auxiliary_loss=_mean([result.auxiliary_loss for result in passes]),
        tokens={name: torch.cat([result.tokens[name] for result in passes]) for name in passes[0].tokens},
        routing=routing,
        traffic=reduce(Traffic.then, counted) if counted else None,
    )


def joined_steps(steps: Sequence[StepResult]) -> StepResult:
    """Joins several optimizer steps into one: the settings of the last, the largest gradient norm, and whether any overflowed."""
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    return replace(steps[-1], grad_norm=max(norms) if norms else None, overflow=any(step.overflow for step in steps))


def update_metrics(
    result: PassResult, step: StepResult, advantages: Tensor, mismatch_N: Tensor | None = None
) -> dict[str, float]:
    """Metrics of the update. `mismatch_N` is the log ratio of learner to sampler at the same weights, measured before the updates.
    It is None for a single update on fresh samples, where it equals the update's own log ratio."""
    log_ratio_N = result.tokens["log_ratio"].double()
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
        "entropy_mean": float(entropy_N.mean()),
        "entropy_p10": _quantile(entropy_N, 0.1),
        "entropy_p90": _quantile(entropy_N, 0.9),
        "mismatch_abs_mean": float(mismatch_N.abs().mean()),
        "mismatch_abs_max": float(mismatch_N.abs().max()),
        # KL(sampler || learner) at the sampler's tokens: k3 with d = log sampler - log learner.
        "mismatch_kl": float(kl_estimate(-mismatch_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), "k3").mean()),
    }
    metrics |= {f"advantage_{name}": value for name, value in _moments(advantages.double()).items()}
    if "reference_kl" in result.tokens:
        metrics["reference_kl"] = float(result.tokens["reference_kl"].double().mean())
    return metrics | step.metrics() | result.routing_metrics()


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """The figures of the progress line. Open problems have no correctness, and a step without an update no mismatch."""
    shown_as = {
        "reward": "reward_mean",
        "correctness": "correctness",
        "format": "format_ok",
        "length": "response_length_mean",
        "tokens/s": "tokens_per_second",
        "mismatch": "mismatch_abs_mean",
    }
    return {label: metrics[name] for label, name in shown_as.items() if name in metrics}


def _moments(values_B: Tensor) -> dict[str, float]:
    return {
        "mean": float(values_B.mean()),
        "std": float(values_B.std(correction=0)),
        "min": float(values_B.min()),
        "max": float(values_B.max()),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _quantile(values_N: Tensor, q: float) -> float:
    # torch.quantile refuses more than 2^24 values; a sort does not.
    sorted_N = values_N.sort().values
    return float(sorted_N[round(q * (sorted_N.numel() - 1))])
