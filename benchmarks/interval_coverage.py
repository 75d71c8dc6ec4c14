"""Measures how often printed 95% intervals hold the truth, and how often a paired test calls two equal models different.

    python benchmarks/interval_coverage.py
    python benchmarks/interval_coverage.py --runs 4000 --false-positives 20000

Every interval at n = 2, 10, 50 and 400, and at shares of 0.02, 0.5 and 0.98. n is the number of problems, solutions, pairs,
sequences or seeds, or of items of each set of CORE. A problem has a solve rate drawn from a Beta distribution, so that its samples
go together; the truth is that over all problems that could have been drawn. `-` stands for no interval printed, because n is too
small or all values are equal. An interval that says nothing holds every truth, so the mean widths follow, as multiples of that of
the exact interval of one outcome per problem. Ends with exit code 1 if an interval of shares covers less than 93%, or is wider than
`WIDEST` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import special

from nmoe.statistics import (
    Interval,
    binomial_interval,
    mean_interval,
    newcombe,
    outcomes_interval,
    paired_difference,
    paired_mean_difference,
    paired_p_value,
    pass_at_k,
    share_interval,
    stratified_mean,
    stratified_share,
    welch,
    within_share,
)
from nmoe.verifier.judge import f1_interval

Array = np.ndarray[Any, Any]
Draw = np.random.Generator
Seen = tuple[Interval | None, float]
"""An interval and the truth that it should hold."""

RUNS = 2000
SIZES = (2, 10, 50, 400)
SHARES = (0.02, 0.5, 0.98)
WANTED = 0.93
# The mean width of an interval of shares at most, and that of a difference, in widths of the exact interval of one outcome per
# problem. A difference of two independent shares has sqrt(2), and up to 2.4 where the interval is [-1, 1].
WIDEST, WIDEST_DIFFERENCE = 1.25, 2.5
SAMPLES, K = 8, 4
MANY_SAMPLES = 100
# How alike the samples of one problem are: most problems are solved nearly always or nearly never.
CONCENTRATION = 0.5
# How far seeds of one experiment lie apart, in log odds, and on how many problems each is evaluated.
SEEDS_APART, SEED_PROBLEMS = 0.5, 400
CORE_SETS = 20
# Hard, middling and easy sets: mean 0.2, 0.42 and 0.85, most problems nearly always or nearly never solved.
DIFFICULTIES = {"hard": (0.3, 1.2), "middling": (0.42, 0.58), "easy": (1.7, 0.3)}


def rates(draws: Draw, n: int, share: float) -> Array:
    """The solve rates of n problems."""
    return draws.beta(CONCENTRATION * share, CONCENTRATION * (1 - share), n)


def one_sample(draws: Draw, n: int, share: float) -> Seen:
    return binomial_interval(int(draws.binomial(n, share)), n), share


def mean_of_samples(draws: Draw, n: int, share: float) -> Seen:
    return share_interval(draws.binomial(SAMPLES, rates(draws, n, share)) / SAMPLES), share


def pass_at_4(draws: Draw, n: int, share: float) -> Seen:
    table = np.array([pass_at_k(count, SAMPLES, K) for count in range(SAMPLES + 1)])
    a, b = CONCENTRATION * share, CONCENTRATION * (1 - share)
    # E[1 - (1 - p)^k] of a Beta(a, b): 1 - prod (b + i)/(a + b + i).
    truth = 1 - float(np.prod([(b + i) / (a + b + i) for i in range(K)]))
    return share_interval(table[draws.binomial(SAMPLES, rates(draws, n, share))]), truth


def rare_successes(draws: Draw, n: int, share: float) -> Seen:
    """Problems of one rate, with so many samples that one or two of them all are right at the lowest share."""
    return share_interval(draws.binomial(MANY_SAMPLES, share / n, n) / MANY_SAMPLES), share / n


def clustered(draws: Draw, n: int, share: float) -> Seen:
    """Outcomes in clusters of unequal sizes: steps of solutions, pairs of prompts."""
    sizes = 1 + draws.poisson(4, n)
    right = draws.binomial(sizes, rates(draws, n, share))
    outcomes = [place < hits for size, hits in zip(sizes, right, strict=True) for place in range(size)]
    return outcomes_interval(outcomes, [*np.repeat(np.arange(n), sizes)]), share


def f1(draws: Draw, n: int, share: float) -> Seen:
    located, clean = (int(count) for count in draws.binomial(n, share, 2))
    return f1_interval((located, n), (clean, n)), share


def core(draws: Draw, n: int, share: float) -> Seen:
    """Sets of all shares whose weighted mean is the given one, and of all baselines."""
    weights = 1 / (1 - np.linspace(0, 0.6, CORE_SETS))
    spread = np.linspace(-1, 1, CORE_SETS) * 0.75 * min(share, 1 - share)
    shares = share + spread - float((weights * spread).sum() / weights.sum())
    rights = draws.binomial(n, shares)
    return stratified_share(list(rights), [n] * CORE_SETS, list(weights)), share


def paired(kind: str, samples: int) -> Callable[[Draw, int, float], Seen]:
    """The difference of two models on the same problems: equal ones; one that solves a tenth of the rest; and one that solves other
    problems."""

    def simulate(draws: Draw, n: int, share: float) -> Seen:
        before = rates(draws, n, share)
        after = {
            "equal": before,
            "gain": before + 0.1 * (1 - before),
            "other problems": rates(draws, n, share),
        }[kind]
        a, b = (draws.binomial(samples, one) / samples for one in (before, after))
        return paired_difference(a, b).interval, 0.1 * (1 - share) if kind == "gain" else 0.0

    return simulate


def paired_steps(draws: Draw, n: int, share: float) -> Seen:
    """A verifier's accuracy since the start: shares of solutions, weighted by their steps."""
    sizes, before = 1 + draws.poisson(4, n), rates(draws, n, share)
    a, b = (draws.binomial(sizes, one) / sizes for one in (before, before + 0.1 * (1 - before)))
    return paired_difference(a, b, sizes).interval, 0.1 * (1 - share)


def unpaired(draws: Draw, n: int, share: float) -> Seen:
    """Two results on different problems."""
    counts = [int(draws.binomial(n, one)) for one in (share, 0.9 * share)]
    a, b = ((count / n, (found := binomial_interval(count, n)).low, found.high) for count in counts)
    return newcombe(a, b), -0.1 * share


def seed_results(draws: Draw, n: int, share: float) -> Array:
    odds = special.logit(share) + SEEDS_APART * draws.standard_normal(n)
    return draws.binomial(SEED_PROBLEMS, special.expit(odds)) / SEED_PROBLEMS


def seed_mean(share: float) -> float:
    """The mean over all seeds, by the quadrature of Gauss and Hermite."""
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    return float((weights * special.expit(special.logit(share) + SEEDS_APART * points)).sum() / weights.sum())


def seeds(draws: Draw, n: int, share: float) -> Seen:
    return within_share(mean_interval(seed_results(draws, n, share))).interval, seed_mean(share)


def seeds_unpaired(draws: Draw, n: int, share: float) -> Seen:
    interval = welch(seed_results(draws, n, share), seed_results(draws, n, share))
    return interval and interval.clipped(-1, 1), 0.0


def seeds_paired(draws: Draw, n: int, share: float) -> Seen:
    odds = special.logit(share) + SEEDS_APART * draws.standard_normal(n)
    results = [draws.binomial(SEED_PROBLEMS, special.expit(one)) / SEED_PROBLEMS for one in (odds, odds)]
    interval = paired_mean_difference(*results).interval
    return interval and interval.clipped(-1, 1), 0.0


def losses(draws: Draw, n: int) -> tuple[Array, Array]:
    """Losses of sequences, with a long tail above, and their numbers of tokens."""
    return draws.gamma(8, 2 / 8, n), np.ceil(60 * draws.lognormal(0, 0.5, n))


def loss(draws: Draw, n: int) -> Seen:
    return mean_interval(*losses(draws, n)).interval, 2.0


def losses_of_sources(draws: Draw, n: int) -> Seen:
    return stratified_mean(
        [(0.7, mean_interval(*losses(draws, n))), (0.3, mean_interval(*losses(draws, n)))]
    ).interval, 2.0


def paired_losses(draws: Draw, n: int) -> Seen:
    before, tokens = losses(draws, n)
    after = before * draws.gamma(40, 0.9 / 40, n)
    return paired_mean_difference(before, after, tokens).interval, -0.2


def unpaired_losses(draws: Draw, n: int) -> Seen:
    found = [mean_interval(*losses(draws, n)) for _ in range(2)]
    if any(one.interval is None for one in found):
        return None, 0.0
    a, b = ((one.value, one.interval.low, one.interval.high) for one in found if one.interval)
    return newcombe(a, b), 0.0


BY_SHARE: dict[str, Callable[[Draw, int, float], Seen]] = {
    "one sample": one_sample,
    f"mean of {SAMPLES} samples": mean_of_samples,
    f"pass@{K} of {SAMPLES}": pass_at_4,
    f"share/n, {MANY_SAMPLES} samples": rare_successes,
    "outcomes in clusters": clustered,
    "F1": f1,
    f"CORE of {CORE_SETS} sets": core,
    **{
        f"paired, {kind}, {samples} sample{'s' * (samples > 1)}": paired(kind, samples)
        for kind in ("equal", "gain", "other problems")
        for samples in (1, SAMPLES)
    },
    "paired, weighted by steps": paired_steps,
    "unpaired": unpaired,
    "mean of seeds": seeds,
    "seeds, unpaired": seeds_unpaired,
    "seeds, paired": seeds_paired,
}
DIFFERENCES = {name for name in BY_SHARE if "paired" in name}
LOSSES: dict[str, Callable[[Draw, int], Seen]] = {
    "loss": loss,
    "loss of two sources": losses_of_sources,
    "loss, paired": paired_losses,
    "loss, unpaired": unpaired_losses,
}


def covered(seen: Sequence[Seen]) -> float | None:
    """The share of intervals that hold the truth; None where hardly any is printed."""
    printed = [one.low <= truth <= one.high for one, truth in seen if one is not None]
    return float(np.mean(printed)) if len(printed) >= len(seen) / 20 else None


def width(seen: Sequence[Seen]) -> float:
    """The mean width of the intervals."""
    return float(np.mean([one.high - one.low for one, _ in seen if one is not None]))


def expected_width(n: int, share: float) -> float:
    """The mean width of the exact interval of n outcomes."""
    rights = np.arange(n + 1)
    chances = np.exp(
        special.gammaln(n + 1)
        - special.gammaln(rights + 1)
        - special.gammaln(n - rights + 1)
        + special.xlogy(rights, share)
        + special.xlog1py(n - rights, -share)
    )
    return float(
        sum(
            chance * width([(binomial_interval(int(right), n), share)])
            for right, chance in zip(rights, chances, strict=True)
        )
    )


def coverage(runs: int = RUNS, seed: int = 0) -> Iterator[tuple[str, int, float | None, float | None, float | None]]:
    """For each kind of interval, number and share (None: a loss) the share of intervals that hold the truth, and their mean width,
    as a multiple of that of the exact interval of n outcomes; None of losses and seeds."""
    draws = np.random.default_rng(seed)
    for name, simulate in BY_SHARE.items():
        for n in SIZES:
            for share in SHARES:
                seen = [simulate(draws, n, share) for _ in range(runs)]
                truth = share if name in DIFFERENCES else seen[0][1]
                wide = None if "seeds" in name else width(seen) / expected_width(n, truth)
                yield name, n, share, covered(seen), wide
    for name, of_losses in LOSSES.items():
        for n in SIZES:
            yield name, n, None, covered([of_losses(draws, n) for _ in range(runs)]), None


def false_positives(
    problems: int = 200, samples: int = 8, seed: int = 2, runs: int = RUNS
) -> Iterator[tuple[str, float, float]]:
    """The share of pairs of equal models whose paired interval leaves out 0, and of those whose p-value is below 5%."""
    draws = np.random.default_rng(seed)
    for name, (a, b) in DIFFICULTIES.items():
        rate_RP = draws.beta(a, b, (runs, problems))
        for count, what in ((1, "one sample"), (samples, f"mean of {samples}")):
            pairs = [*zip(*(draws.binomial(count, rate_RP) / count for _ in range(2)), strict=True)]
            intervals = [paired_difference(*pair).interval for pair in pairs]
            apart = float(np.mean([one.low > 0 or one.high < 0 for one in intervals]))
            yield f"{name}: {what}", apart, float(np.mean([paired_p_value(*pair) < 0.05 for pair in pairs]))


def widest(name: str) -> float:
    """The mean width that an interval of shares may have (`coverage`)."""
    return WIDEST_DIFFERENCE if name in DIFFERENCES else WIDEST


def _print(title: str, figures: dict[tuple[str, int, float | None], float | None], form: str) -> None:
    """A row for each kind of interval, a column for each number and share."""
    print(f"{title:34}" + "".join(f"{f'n = {n}':^24}" for n in SIZES))
    print(" " * 34 + "".join(f"{share:>7}" for share in SHARES).ljust(24) * len(SIZES))
    rows: dict[str, dict[int, list[float | None]]] = {}
    for (name, n, _), figure in figures.items():
        rows.setdefault(name, {}).setdefault(n, []).append(figure)
    for name, by_size in rows.items():
        cells = [
            "".join(f"{'-' if one is None else form.format(one):>7}" for one in by_size[n]).ljust(24) for n in SIZES
        ]
        print(f"{name:34}" + "".join(cells).rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="simulated evaluations of each interval")
    parser.add_argument("--false-positives", type=int, default=RUNS, metavar="RUNS", help="pairs of equal models a row")
    arguments = parser.parse_args()
    rows = [*coverage(arguments.runs)]
    covers, widths = ({row[:3]: row[column] for row in rows} for column in (3, 4))
    _print("coverage at shares of", covers, "{:.1%}")
    _print("mean width, relative", {key: one for key, one in widths.items() if one is not None}, "{:.2f}")
    lowest = min(one for one in covers.values() if one is not None)
    too_wide = [key for key, one in widths.items() if one is not None and one > widest(key[0])]
    print(f"lowest coverage: {lowest:.1%}, wanted: {WANTED:.0%}")
    for name, interval, p in false_positives(runs=arguments.false_positives):
        print(f"equal models called different  {name}: {interval:.2%} by the interval, {p:.2%} by p < 0.05")
    if lowest < WANTED:
        raise SystemExit(f"an interval covers {lowest:.1%}")
    if too_wide:
        raise SystemExit(f"wider than wanted: {too_wide}")


if __name__ == "__main__":
    main()
