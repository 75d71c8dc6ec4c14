"""How often the 95% intervals of evaluations hold the truth, and how often a paired test calls two equal models different.

    python benchmarks/interval_coverage.py
    python benchmarks/interval_coverage.py --false-positives 20000    those of 20,000 evaluations a row, and of all together

A problem has a solve rate drawn from a Beta distribution, and its samples are right at that rate. The truth is the mean over all
problems that could have been drawn. Each row is 1,000 simulated evaluations unless said otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from nmoe.statistics import paired_difference, pass_at_k, share_interval, wilson

RUNS = 1000
# Hard, middling and easy sets: mean 0.2, 0.42 and 0.85, most problems nearly always or nearly never solved.
DIFFICULTIES = {"hard": (0.3, 1.2), "middling": (0.42, 0.58), "easy": (1.7, 0.3)}


def coverage(problems: int = 200, samples: int = 8, k: int = 4, seed: int = 0) -> Iterator[tuple[str, float]]:
    """The share of intervals that hold the truth: of one sample a problem (Wilson), of the mean of several and of pass@k
    (over problems), and of the difference of two models, paired."""
    draws = np.random.default_rng(seed)
    for name, (a, b) in DIFFICULTIES.items():
        rate_RP = draws.beta(a, b, (RUNS, problems))
        right_RP = draws.binomial(samples, rate_RP)
        mean = a / (a + b)
        singles = [wilson(int(count), problems) for count in (draws.random((RUNS, problems)) < rate_RP).sum(1)]
        yield f"{name}: one sample", float(np.mean([one.low <= mean <= one.high for one in singles]))
        means = [share_interval(row) for row in right_RP / samples]
        yield f"{name}: mean of {samples}", float(np.mean([one.low <= mean <= one.high for one in means]))
        table = np.array([pass_at_k(count, samples, k) for count in range(samples + 1)])
        # E[1 - (1 - p)^k] of a Beta(a, b): 1 - prod (b + i)/(a + b + i).
        truth = 1 - float(np.prod([(b + i) / (a + b + i) for i in range(k)]))
        anys = [share_interval(row) for row in table[right_RP]]
        yield f"{name}: pass@{k} of {samples}", float(np.mean([one.low <= truth <= one.high for one in anys]))
        # The second model solves a problem's remainder at a tenth of the rate: a gain that depends on the problem.
        better_RP = rate_RP + 0.1 * (1 - rate_RP)
        gains = [
            paired_difference(*pair).interval
            for pair in zip(
                (draws.random((RUNS, problems)) < rate_RP).astype(float),
                (draws.random((RUNS, problems)) < better_RP).astype(float),
                strict=True,
            )
        ]
        gain = 0.1 * (1 - mean)
        yield f"{name}: paired gain", float(np.mean([one.low <= gain <= one.high for one in gains]))


def false_positives(
    problems: int = 200, samples: int = 8, seed: int = 2, runs: int = RUNS
) -> Iterator[tuple[str, float]]:
    """The share of pairs of equal models whose paired interval leaves out 0."""
    draws = np.random.default_rng(seed)
    for name, (a, b) in DIFFICULTIES.items():
        rate_RP = draws.beta(a, b, (runs, problems))
        for count, what in ((1, "one sample"), (samples, f"mean of {samples}")):
            pairs = zip(*(draws.binomial(count, rate_RP) / count for _ in range(2)), strict=True)
            intervals = [paired_difference(*pair).interval for pair in pairs]
            yield f"{name}: {what}", float(np.mean([one.low > 0 or one.high < 0 for one in intervals]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--false-positives", type=int, metavar="RUNS", help="only these, of so many evaluations a row")
    runs = parser.parse_args().false_positives
    rows = [] if runs else [("coverage", *row) for row in coverage()]
    positives = list(false_positives(runs=runs or RUNS))
    for title, name, share in rows + [("false positives", *row) for row in positives]:
        print(f"{title}  {name}: {share:.1%}")
    total = len(positives) * (runs or RUNS)
    count = round(sum(share for _, share in positives) / len(positives) * total)
    interval = wilson(count, total)
    print(
        f"false positives  all: {count / total:.2%} [{interval.low:.2%}, {interval.high:.2%}] of {total:,} evaluations"
    )


if __name__ == "__main__":
    main()
