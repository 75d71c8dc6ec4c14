"""Metrics of an optimizer step and of the routers, by the names that `docs/reference/metrics.md` documents."""

# Shapes: E experts.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nmoe.learner.learner import PassResult
from nmoe.learner.optimizer import StepResult


def optimizer_metrics(step: StepResult) -> dict[str, float]:
    """Metrics of an optimizer step. A step that was skipped for an overflow has no gradient norm."""
    metrics = {"learning_rate": step.learning_rate}
    if step.grad_norm is not None:
        metrics["grad_norm"] = step.grad_norm
    if step.loss_scale is not None:
        metrics |= {"loss_scale": step.loss_scale, "overflow": float(step.overflow)}
    return metrics


def routing_metrics(result: PassResult) -> dict[str, Any]:
    """Metrics of the routers per layer; none for a dense model."""
    if result.routing is None:
        return {}
    metrics: dict[str, Any] = {
        "route_picks": float(result.routing.picks),
        "route_flips": float(result.routing.flips),
        "route_flip_gap_max": result.routing.largest_flip_gap,
        "router_aux_loss": result.auxiliary_loss,
    }
    per_layer: dict[str, Sequence[float]] = {
        "expert_load_max_violation": result.routing.load_max_violation(),
        "router_entropy": result.routing.router_entropy(),
        "dead_experts": result.routing.dead_experts(),
    }
    for name, values in per_layer.items():
        metrics |= {f"{name}/{layer}": float(value) for layer, value in enumerate(values)}
    for layer, shares_E in enumerate(result.routing.load_shares()):
        metrics[f"expert_load/{layer}"] = [round(share, 5) for share in shares_E]
    return metrics
