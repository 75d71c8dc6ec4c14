"""A plan as lines of text."""

from __future__ import annotations

from nmoe.plan.ranks import RankPlan


def gib(count: float) -> str:
    """Bytes for people: `2.0 GiB`, `0.5 MiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def lines(plan: RankPlan, memory: int | None) -> list[str]:
    """What a rank holds and sends, and whether that fits its `memory` in bytes, if that is known."""
    share = plan.local_parameters * plan.world / (plan.parameters * plan.axes.dp_replicate)
    found = [
        plan.axes.said or "parallel: one rank",
        f"{plan.parameters:,} parameters, {plan.local_parameters:,} on rank 0 ({share:.3f} of an even share)",
        f"a rank holds about {gib(plan.total)}:",
        *_parts(plan.held),
    ]
    if plan.host:
        found += [
            f"and {gib(sum(plan.host.values()))} in the machine's memory, by parallel.offload:",
            *_parts(plan.host),
        ]
    if plan.sent:
        found += [f"and sends at most {gib(sum(plan.sent.values()))} for an optimizer step:", *_parts(plan.sent)]
    if memory is not None:
        fits = plan.total <= memory
        size = f"{memory / 2**30:.4g} GiB" if memory >= 2**30 else gib(memory)
        found.append(f"fits {size}" if fits else f"does not fit {size}; {advice(plan)}")
    return found


def parts(plan: RankPlan) -> str:
    """What a rank holds, in one line."""
    each = ", ".join(f"{name} {gib(count)}" for name, count in plan.held.items())
    return f"{gib(plan.total)} ({each})" + ("" if plan.world == 1 else f" on each of {plan.world} ranks")


def advice(plan: RankPlan) -> str:
    """What would make a rank's part smaller."""
    return f"what helps, the cheapest first: {'; '.join(plan.remedies)}"


def _parts(parts: dict[str, int]) -> list[str]:
    return [f"  {name:<24} {gib(count):>10}" for name, count in parts.items()]
