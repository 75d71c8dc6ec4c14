"""Alarms over a run's metrics: a line in alerts.jsonl and one on the console when something goes wrong, not one every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# An expert layer's load is collapsing where its busiest expert has this many times its fair share, or this part of its experts
# has nothing to do. A fresh router of 8 experts stays below 1 (`expert_load_max_violation`), and all tokens to 2 of 8 make 3.
COLLAPSE_VIOLATION = 2.0
COLLAPSE_DEAD = 0.5
# It has recovered where it is well below both.
RECOVERED_VIOLATION = 1.0
RECOVERED_DEAD = 0.25
# Steps in a row, either way: the load of one small batch says little.
COLLAPSE_STEPS = 5
# Steps that are not looked at: a fresh router is uneven until it has been balanced a few times.
WARM_UP_STEPS = 10


@dataclass
class _Layer:
    bad: int = 0
    good: int = 0
    raised: bool = False


class ExpertWatch:
    """Tells when the experts of a layer collapse, once, and when they have recovered.

    Raised after `COLLAPSE_STEPS` steps in a row at or over a threshold, the first `WARM_UP_STEPS` aside, and armed again after as
    many below the lower ones. A resumed run starts counting anew.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._layers: dict[str, _Layer] = {}
        self._steps = 0

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """The message of a new alarm, or that one is over, if this step's metrics (`docs/reference/metrics.md`) say so."""
        raised, over = [], []
        self._steps += any(name.startswith("expert_load_max_violation/") for name in metrics)
        if self._steps <= WARM_UP_STEPS:
            return None
        for name, violation in metrics.items():
            if not name.startswith("expert_load_max_violation/"):
                continue
            layer = name.rpartition("/")[2]
            dead = metrics[f"dead_experts/{layer}"] / self.experts
            state = self._layers.setdefault(layer, _Layer())
            state.bad = state.bad + 1 if violation >= COLLAPSE_VIOLATION or dead >= COLLAPSE_DEAD else 0
            state.good = state.good + 1 if violation < RECOVERED_VIOLATION and dead < RECOVERED_DEAD else 0
            if state.raised and state.good >= COLLAPSE_STEPS:
                state.raised = False
                over.append(f"layer {layer}")
            if not state.raised and state.bad >= COLLAPSE_STEPS:
                state.raised = True
                raised.append(
                    f"layer {layer} (its busiest expert has {violation + 1:.1f} times its share, {dead:.0%} have nothing to do)"
                )
        messages = []
        if over:
            messages.append(f"experts have recovered in {', '.join(over)}: {COLLAPSE_STEPS} steps with an even load")
        if raised:
            messages.append(
                f"experts collapse in {', '.join(raised)} for {COLLAPSE_STEPS} steps: raise router_aux_loss_coef, or "
                "router_bias_rate where the router balances by its bias"
            )
        return "; ".join(messages) or None
