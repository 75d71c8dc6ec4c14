"""A plan as lines of text."""

from __future__ import annotations

from nmoe.plan.ranks import RankPlan
from nmoe.preflight.check import gib


def lines(plan: RankPlan, memory_gib: float | None) -> list[str]:
    """The lines that `nmoe plan` prints."""
    share = plan.local_parameters * plan.world / (plan.parameters * plan.axes.dp_replicate)
    found = [
        plan.axes.said or "parallel: one rank",
        f"{plan.parameters:,} parameters, {plan.local_parameters:,} on rank 0 ({share:.3f} of an even share)",
        f"a rank holds about {gib(plan.total)}:",
        *_parts(plan.held),
    ]
    if plan.sent:
        found += [f"and sends at most {gib(sum(plan.sent.values()))} for an optimizer step:", *_parts(plan.sent)]
    if memory_gib is not None:
        fits = plan.total <= memory_gib * 2**30
        found.append(
            f"fits {memory_gib:g} GiB"
            if fits
            else f"does not fit {memory_gib:g} GiB; what helps, the cheapest first: {'; '.join(plan.remedies)}"
        )
    return found


def _parts(parts: dict[str, int]) -> list[str]:
    return [f"  {name:<24} {gib(count):>10}" for name, count in parts.items()]
