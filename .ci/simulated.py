"""Simulates large runs within a budget of CPU seconds, with faults: python .ci/simulated.py [--quick]

A million groups on 10,000 engines with 100 publications (300 CPU s), and 100,000 groups on 100,000 engines with 5 publications
(60 CPU s). `Flight` raises where a promise is broken. With --quick a hundredth of both. Exit code 1 where a budget is exceeded.
"""

from __future__ import annotations

import random
import resource
import sys
import time

from nmoe.cluster.simulate.flight import Flight
from nmoe.cluster.simulate.setting import Fault, Setting

KINDS: tuple[Fault, ...] = ("death", "hang", "lie")


def flown(name: str, setting: Setting, publications: int, cpu_s: float) -> bool:
    """Simulates a run, prints its figures, and returns whether it kept its budget."""
    began = time.process_time()
    flight = Flight(setting)
    flight.run()
    one, spent = flight.account, time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{name}: {flight.tickets.next:,} groups on {setting.engines:,} engines, {one.steps} publications, {one.ended:,} ended, "
        f"{one.retried:,} tried again, {one.restarts:,} restarts; oldest {max(one.ages)} of {setting.staleness}; "
        f"{spent:.0f} CPU s of {cpu_s:.0f}, {memory} MiB",
        flush=True,
    )
    return spent <= cpu_s and one.steps >= publications and flight.tickets.next == setting.tickets


def faults(count: int, engines: int, seconds: float) -> tuple[tuple[float, Fault, int], ...]:
    draw = random.Random(1)
    return tuple((draw.uniform(0, seconds), draw.choice(KINDS), draw.randrange(engines)) for _ in range(count))


def main() -> int:
    part = 100 if "--quick" in sys.argv[1:] else 1
    million = Setting(
        tickets=1_000_000 // part,
        engines=10_000 // part,
        groups=9_600 // part,
        samples=4,
        slots=64,
        staleness=4,
        mean_tokens=1000,
        most_tokens=8000,
        doubled=0.01,
        equal=0.02,
        faults=faults(2000 // part, 10_000 // part, 3000),
    )
    many = Setting(
        tickets=100_000 // part,
        engines=100_000 // part,
        groups=15_000 // part,
        samples=2,
        slots=8,
        staleness=2,
        mean_tokens=1000,
        most_tokens=8000,
        faults=faults(2000 // part, 100_000 // part, 200),
    )
    kept = [flown("many groups", million, 100, 300 / part), flown("many engines", many, 5, 60 / part)]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
