"""Render README.md's table of measured speedruns from benchmarks/results/speedrun_seeds.json:

python scripts/seeds_table.py          prints it
python scripts/seeds_table.py --write  puts it into README.md, between its two markers
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/speedrun_seeds.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- seeds: python scripts/seeds_table.py --write -->\n", "<!-- /seeds -->\n"

ROWS = (
    ("held-out, sampled at temperature 1", "base_correctness", "trained_correctness"),
    ("greedy", "greedy_base", "greedy_trained"),
    ("sampled, adding only", "correctness_base_add", "correctness_trained_add"),
    ("sampled, reversing only", "correctness_base_reverse", "correctness_trained_reverse"),
    ("sampled, sorting only", "correctness_base_sort", "correctness_trained_sort"),
    ("pass@16", "pass16_base", "pass16_trained"),
    ("longer problems than RL trained on, sampled", "ood_base", "ood_trained"),
    ("in the required format", "base_format_ok", "format_ok"),
)
"""Label, and the names of its figure for the base and for the model after RL."""

_KERNELS = {"native": "with this CPU's C++ kernels", "avx2": "with AVX2 kernels", "plain": "without C++ kernels"}


def table(records: Sequence[dict[str, Any]]) -> str:
    """The table, and a sentence on what was measured; records have one base each."""
    bases = "one base" if len(records) == 1 else f"{len(records)} bases"
    lines = [
        f"| correct answers, {bases} | base, median (range) | after RL, median | after RL, worst |",
        "|---|---|---|---|",
    ]
    for label, before, after in ROWS:
        base, trained = ([record[name] for record in records] for name in (before, after))
        lines.append(
            f"| {label} | {statistics.median(base):.1%} ({min(base):.1%} to {max(base):.1%}) "
            f"| {statistics.median(trained):.1%} | {min(trained):.1%} |"
        )
    return "\n".join([*lines, "", *_setting(records)]) + "\n"


def _setting(records: Sequence[dict[str, Any]]) -> list[str]:
    measured = Counter((_KERNELS[record["kernels"]], record["cpu"]) for record in records)
    alone = sum(record["threads"] == 1 for record in records)
    machines = "; ".join(f"{count} {kernels} on {cpu}" for (kernels, cpu), count in sorted(measured.items()))
    steps, seconds = ([record[name] for record in records] for name in ("rl_steps", "cpu_s"))
    largest = max(record["mismatch_abs_max"] for record in records)
    agreement = "identical to the bit" if largest == 0 else f"at most {largest:.1e} nats apart"
    kept = sum(record["kept_every_promise"] for record in records)
    return [
        f"Measured so far: {len(records)} of 20 bases ({machines}; {alone} on one thread, beside another, "
        f"{len(records) - alone} on two).",
        f"RL took {min(steps)} to {max(steps)} steps, a whole run {min(seconds):.0f} to {max(seconds):.0f} CPU seconds.",
        f"{kept} of {len(records)} kept every promise. The log-probabilities of engine and learner were {agreement}.",
    ]


def block() -> str:
    """What stands between the markers."""
    return table(json.loads(RESULTS.read_text()))


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(before + BEGIN + block() + END + rest.partition(END)[2])
    else:
        print(block(), end="")


if __name__ == "__main__":
    main()
