"""Measures how often a probe ends a run: if nothing changed, and if a share of the solved problems was lost halfway.

    python benchmarks/stopping.py            half a minute; prints a line for each kind of run

Each run is evaluated on 200 problems, of which 30% are solved by chance at each evaluation and the others always or never. The rule
is that of `nmoe.runs.ledger`, in two evaluations in a row; beside it two successive drops of the share, which was the rule before.
"""

from __future__ import annotations

import random
from typing import Any

from nmoe.runs.ledger import lasting_loss

PROBLEMS, UNCERTAIN = 200, 0.3


def result(draw: random.Random, chances: list[float]) -> dict[str, Any]:
    right = [float(draw.random() < chance) for chance in chances]
    outcomes = {str(place): one for place, one in enumerate(right)}
    return {"mode": "greedy_pass@1", "dataset": "made", "value": sum(right) / len(right), "outcomes": outcomes}


def ended(evaluations: int, runs: int, lost: float = 0.0, seed: int = 0) -> tuple[float, float]:
    """The shares of runs that the paired rule ends, and that two successive drops end."""
    draw, by_loss, by_drops = random.Random(seed), 0, 0
    for _ in range(runs):
        chances = [draw.random() if draw.random() < UNCERTAIN else float(draw.random() < 0.5) for _ in range(PROBLEMS)]
        kept = [1.0 if place < evaluations // 2 else 1 - lost for place in range(evaluations)]
        history = [result(draw, [share * chance for chance in chances]) for share in kept]
        by_loss += any(lasting_loss(history[:count], 2) for count in range(3, evaluations + 1))
        values = [one["value"] for one in history]
        by_drops += any(values[at] > values[at + 1] > values[at + 2] for at in range(evaluations - 2))
    return by_loss / runs, by_drops / runs


def main() -> None:
    print(f"{'':44} paired loss   two drops")
    for evaluations, runs, lost in ((6, 1000, 0.0), (30, 200, 0.0), (6, 300, 0.1), (6, 300, 0.2), (6, 300, 0.4)):
        name = f"{evaluations} evaluations, {lost:.0%} lost after half of them"
        by_loss, by_drops = ended(evaluations, runs, lost)
        print(f"{name:44} {by_loss:11.1%} {by_drops:11.1%}")


if __name__ == "__main__":
    main()
