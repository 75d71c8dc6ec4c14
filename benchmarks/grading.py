r"""Gradings per second: plain numbers, forms that only math-verify can settle, and a mix; one JSON line.

    python benchmarks/grading.py > benchmarks/results/grading.json

Each side runs in a process of its own, in turns, `--rounds` times; the median counts. math-verify is called as a library
user would: `parse("$gold$")`, `parse("$answer$")`, `verify`, with its timeouts off, which is its faster form. nmoe grades the
same pairs with `grade_answers`: this process and one worker. Both have warmed up on the same few pairs before the clock.
Plain numbers are graded in this process alone.

The mix has 100 answers: 60 integers, 10 decimals, 10 fractions, 8 tuples, sets and intervals, 4 with units, 8 that only
math-verify can settle. Half of all answers are right, and no pair comes twice.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

Pair = tuple[str, str]


def integer(rng: random.Random) -> Pair:
    gold = rng.randrange(-1000, 10**6)
    answer = gold if rng.random() < 0.5 else gold + rng.randrange(1, 100)
    return str(gold), rng.choice([f"{answer}", f"{answer}", f"{answer:,}", f"${answer}$"])


def decimal(rng: random.Random) -> Pair:
    gold = rng.randrange(-(10**5), 10**5) / 1000
    return str(gold), str(gold if rng.random() < 0.5 else round(gold + 0.01, 3))


def fraction(rng: random.Random) -> Pair:
    numerator, denominator, factor = rng.randrange(1, 500), rng.randrange(2, 500), rng.randrange(2, 9)
    other = numerator + (rng.random() < 0.5)
    return rf"\frac{{{numerator}}}{{{denominator}}}", f"{other * factor}/{denominator * factor}"


def structure(rng: random.Random) -> Pair:
    items = [str(rng.randrange(-99, 99)) for _ in range(3)]
    others = items if rng.random() < 0.5 else [*items[:2], str(int(items[2]) + 1)]
    kind = rng.randrange(3)
    if kind == 0:
        return f"({', '.join(items)})", rf"\left({','.join(others)}\right)"
    if kind == 1:
        return rf"\{{{', '.join(items)}\}}", rf"\{{{','.join(reversed(others))}\}}"
    return rf"[{items[0]}, \infty)", rf"x \ge {others[0]}"


def unit(rng: random.Random) -> Pair:
    gold = rng.randrange(1, 10**4)
    return rf"{gold}\text{{ cm}}", f"{gold + (rng.random() < 0.5)} cm"


def symbolic(rng: random.Random) -> Pair:
    a, b, c, d = (rng.randrange(2, 30) for _ in range(4))
    wrong = int(rng.random() < 0.5)
    kind = rng.randrange(10)
    if kind == 0:
        return f"({a}x+{b})({c}x+{d})", f"{a * c}x^2+{a * d + b * c + wrong}x+{b * d}"
    if kind == 1:
        return rf"\sqrt{{{a * a * b}}}+{c}", rf"{c}+{a + wrong}\sqrt{{{b}}}"
    if kind == 2:
        return rf"\frac{{{a}}}{{\sqrt{{{b}}}}}+{c}\pi", rf"\frac{{{a + wrong}\sqrt{{{b}}}}}{{{b}}}+{c}\pi"
    if kind == 3:
        return rf"{a}\ln {b}+{c}x", rf"\ln {b}^{{{a + wrong}}}+{c}x"
    if kind == 4:
        return rf"\frac{{x^2-{a * a}}}{{x-{a}}}+{b}", f"x+{a + b + wrong}"
    if kind == 5:
        return f"y={a}x+{b}", f"{c}y-{a * c}x={b * c + wrong}"
    if kind == 6:
        return f"{a}x+{b}y", f"{b}y+{a + wrong}x"
    if kind == 7:
        return rf"\frac{{{a}\pi}}{{{b}}}", rf"{a + wrong}\pi/{b}"
    if kind == 8:
        return f"{a}+{b}i", f"{b + wrong}i+{a}"
    return str(a**2 + wrong), f"{a}^2"


MIX = [(integer, 60), (decimal, 10), (fraction, 10), (structure, 8), (unit, 4), (symbolic, 8)]


def pairs(workload: str, count: int) -> list[Pair]:
    """Distinct pairs, always the same."""
    rng = random.Random(0)
    makers: dict[str, list[Callable[[random.Random], Pair]]] = {
        "plain": [integer, integer, integer, decimal, fraction],
        "symbolic": [symbolic],
        "mix": [maker for maker, share in MIX for _ in range(share)],
    }
    found: dict[Pair, None] = {}
    while len(found) < count:
        found[makers[workload][len(found) % len(makers[workload])](rng)] = None
    shuffled = list(found)
    rng.shuffle(shuffled)
    return shuffled


def run_nmoe(work: list[Pair], alone: bool) -> tuple[float, list[bool], Counter[str]]:
    from nmoe.grading.math import answers
    from nmoe.grading.math.equivalence import settle
    from nmoe.grading.workers.pool import WorkerPool

    if alone:
        settle("1", "x")
        began = time.perf_counter()
        verdicts = [settle(gold, answer) for gold, answer in work]
        elapsed = time.perf_counter() - began
        assert None not in verdicts
    else:
        answers._pool = WorkerPool("nmoe.grading.math.symbolic:equal", 1)
        assert next(answers.grade_answers([("x+y", "y+x")])).outcome == "correct"
        began = time.perf_counter()
        verdicts = list(answers.grade_answers(work))
        elapsed = time.perf_counter() - began
    layers = Counter(verdict.layer for verdict in verdicts)
    return elapsed, [verdict.outcome == "correct" for verdict in verdicts], layers


def run_math_verify(work: list[Pair]) -> tuple[float, list[bool], Counter[str]]:
    import logging

    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    from nmoe.grading.math.symbolic import WARM_UP

    def grade(gold: str, answer: str) -> bool:
        parsed = [parse(f"${text}$" if "$" not in text else text, parsing_timeout=None) for text in (gold, answer)]
        return bool(verify(parsed[0], parsed[1], timeout_seconds=None))

    for gold, answer in WARM_UP:
        grade(gold, answer)
    began = time.perf_counter()
    outcomes = [grade(gold, answer) for gold, answer in work]
    return time.perf_counter() - began, outcomes, Counter()


def side(name: str, workload: str, count: int) -> dict[str, object]:
    command = [sys.executable, __file__, "--side", name, "--workload", workload, "--count", str(count)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=["nmoe", "math_verify"])
    parser.add_argument("--workload", choices=["plain", "symbolic", "mix"])
    parser.add_argument("--count", type=int)
    arguments = parser.parse_args()
    if arguments.side:
        work = pairs(arguments.workload, arguments.count)
        if arguments.side == "nmoe":
            elapsed, outcomes, layers = run_nmoe(work, arguments.workload == "plain")
        else:
            elapsed, outcomes, layers = run_math_verify(work)
        print(json.dumps({"per_second": len(work) / elapsed, "outcomes": outcomes, "layers": layers}))
        return
    from machine import machine, versions  # torch: the sides do without

    result: dict[str, object] = {"benchmark": "grading"}
    for workload, count in (("plain", 100_000), ("symbolic", 300), ("mix", 1000)):
        names = ["nmoe"] if workload == "plain" else ["nmoe", "math_verify"]
        rounds = [{name: side(name, workload, count) for name in names} for _ in range(arguments.rounds)]
        for name in names:
            rate = statistics.median(one[name]["per_second"] for one in rounds)
            result[f"{workload}_{name}_per_second"] = round(rate, 1)
        if len(names) > 1:
            ratios = [one["nmoe"]["per_second"] / one["math_verify"]["per_second"] for one in rounds]
            result[f"{workload}_ratio"] = round(statistics.median(ratios), 3)
            both = zip(rounds[0]["nmoe"]["outcomes"], rounds[0]["math_verify"]["outcomes"], strict=True)
            result[f"{workload}_same_verdict"] = round(sum(one == other for one, other in both) / count, 4)
        layers = rounds[0]["nmoe"]["layers"]
        result[f"{workload}_layers"] = {name: round(layers[name] / count, 4) for name in sorted(layers)}
    print(json.dumps(result | machine() | versions("math-verify", "sympy")))


if __name__ == "__main__":
    main()
