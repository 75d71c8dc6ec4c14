"""Renders README.md's tables of measured seeds from benchmarks/results:

python scripts/seeds_table.py          prints them
python scripts/seeds_table.py --write  puts them into README.md, each between its two markers
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
sys.path.insert(0, str(ROOT / "benchmarks"))

from result_files import read_records  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
README = ROOT / "README.md"

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

RECIPES = (
    (
        "rl train sort_grpo",
        "[GRPO and related methods](docs/guides/algorithms.md)",
        "sorting, sampled",
        "sort_grpo",
        "figure",
    ),
    ("rl train sort_ppo", "PPO: the same loop with a critic", "sorting, sampled", "sort_ppo", "figure"),
    (
        "rl train sort_distillation",
        "[on-policy distillation](docs/guides/algorithms.md#on-policy-distillation) from `sort_grpo`, 25 steps",
        "sorting, greedy",
        "sort_distillation",
        "figure",
    ),
    (
        "rl train tools",
        "[tool use](docs/guides/tools.md), after `nmoe pretrain tools_base`",
        "arithmetic with a tool, sampled",
        "tools",
        "figure",
    ),
    ("sft sft --records.path=FILE", "[conversations](docs/guides/sft.md)", "sorting, greedy", "sft", "figure"),
    ("dpo dpo", "[preferences](docs/guides/preference.md), from `nmoe data pairs`", "held-out pairs", "dpo", "figure"),
    (
        "reward reward",
        "[a reward model](docs/guides/preference.md#reward-models)",
        "held-out pairs",
        "reward",
        "figure",
    ),
    ("verifier verifier", "[a verifier of steps](docs/guides/verifier.md)", "F1", "verifier", "figure"),
    (
        "eval ... --best-of VERIFIER",
        "nothing: that verifier chooses among 8 samples",
        "sums; a majority vote: {majority_of_8:.1%}",
        "sums",
        "best_of_8",
    ),
    ("rl train sums_rl", "RL on that verifier's judgement alone", "sums, greedy", "sums_rl", "figure"),
    (
        "selfplay selfplay",
        "[self-play](docs/guides/selfplay.md), after `./speedrun.sh --scratch --full`",
        "agreement with a hidden oracle, greedy",
        "selfplay",
        "figure",
    ),
)
"""The command, what it trains, the name of its figure (which may show the median of others), its recipe and the figure's field."""

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
    minutes = [record["wall_s"] / 60 for record in records if record["threads"] == 2 and record["kernels"] != "plain"]
    largest = max(record["mismatch_abs_max"] for record in records)
    agreement = "identical to the bit" if largest == 0 else f"at most {largest:.1e} nats apart"
    kept = sum(record["kept_every_promise"] for record in records)
    return [
        f"Measured so far: {len(records)} of 20 bases ({machines}; {alone} on one thread, beside another, "
        f"{len(records) - alone} on two).",
        f"RL took {min(steps)} to {max(steps)} steps, a whole run {min(seconds):.0f} to {max(seconds):.0f} CPU seconds; "
        f"on two threads with C++ kernels {min(minutes):.1f} to {max(minutes):.1f} minutes by the clock.",
        f"{kept} of {len(records)} kept every promise. The log-probabilities of engine and learner were {agreement}.",
    ]


def recipes_table(records: Sequence[dict[str, Any]]) -> str:
    """One line for each of RECIPES that was measured: median and worst over its seeds."""
    lines = [
        "| command | training | right on held-out problems | median | worst | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for command, trains, name, recipe, field in RECIPES:
        measured = [record for record in records if record["recipe"] == recipe]
        figures = [record[field] for record in measured]
        medians = {
            other: statistics.median(record[other] for record in measured)
            for other, value in measured[0].items()
            if isinstance(value, float)
        }
        lines.append(
            f"| `nmoe {command}` | {trains} | {name.format(**medians)} "
            f"| {statistics.median(figures):.1%} | {min(figures):.1%} | {len(figures)} |"
        )
    return "\n".join(lines) + "\n"


def real_table(records: Sequence[dict[str, Any]]) -> str:
    """One line for each task that a released model learned, and a sentence on what was measured; a record for each seed."""
    if not records:
        return ""
    lines = [
        "| task | chance | right, base | right, after RL | worst | gain in points | least, with its 95% interval | in form "
        "| right given form |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in (name.removeprefix("problems_") for name in records[0] if name.startswith("problems_")):

        def median(figure: str, task: str = task) -> str:
            measured = [record[f"{figure}_{task}"] for record in records if f"{figure}_{task}" in record]
            return f"{statistics.median(measured):.1%}" if measured else "none in form"

        gains = [record[f"gain_{task}"] for record in records]
        least = min(records, key=lambda record, task=task: record[f"gain_{task}"])  # type: ignore[misc]
        low, high = (100 * least[f"gain_{task}_{bound}"] for bound in ("low", "high"))
        lines.append(
            f"| {task} | {median('chance')} | {median('base')} | {median('trained')} "
            f"| {min(record[f'trained_{task}'] for record in records):.1%} | {100 * statistics.median(gains):+.1f} "
            f"| {100 * min(gains):+.1f} [{low:+.1f}, {high:+.1f}] | {median('base_in_form')} to {median('trained_in_form')} "
            f"| {median('base_given_form')} to {median('trained_given_form')} |"
        )
    return "\n".join([*lines, "", *_real_setting(records)]) + "\n"


def _real_setting(records: Sequence[dict[str, Any]]) -> list[str]:
    problems = {record[name] for record in records for name in record if name.startswith("problems_")}
    machines = Counter((record["cpu"], record["threads"]) for record in records)
    where = "; ".join(
        f"{count} on {threads} thread{'s' * (threads > 1)} of {cpu}"
        for (cpu, threads), count in sorted(machines.items())
    )
    # Minutes by the clock would say how busy the machine was.
    cpu, memory = ([record[name] for record in records] for name in ("cpu_s", "peak_memory_mb"))
    ratios = [record["perplexity_ratio"] for record in records if "perplexity_ratio" in record]
    asked = f"{min(problems)} to {max(problems)}" if len(problems) > 1 else f"{min(problems)}"
    return [
        f"Medians of {len(records)} seeds ({where}) on {asked} held-out problems a task, greedy, with room for 128 tokens; an "
        "answer counts wherever it stands.",
        f"A whole run took {min(cpu):.0f} to {max(cpu):.0f} CPU seconds and at most {max(memory) / 1000:.1f} GB."
        + (f" Perplexity on lambada became {min(ratios):.3f} to {max(ratios):.3f} times as large." if ratios else ""),
        f"{sum(record['kept_every_promise'] for record in records)} of {len(records)} kept every promise.",
    ]


def blocks() -> dict[str, str]:
    """What stands in README.md between the markers of each name."""

    rounds = json.loads((RESULTS / "selfplay.json").read_text())["results"]
    selfplay = [{"recipe": "selfplay", "figure": one["greedy"]["after"]} for one in rounds]
    return {
        "real": real_table(json.loads((RESULTS / "real_seeds.json").read_text())),
        "seeds": table(read_records(RESULTS / "speedrun_seeds.json")),
        "recipes": recipes_table([*read_records(RESULTS / "recipe_seeds.json"), *selfplay]),
    }


def markers(name: str) -> tuple[str, str]:
    """The lines of README.md before and after a table."""
    return f"<!-- {name}: python scripts/seeds_table.py --write -->\n", f"<!-- /{name} -->\n"


def main() -> None:
    for name, block in blocks().items():
        if sys.argv[1:] == ["--write"]:
            begin, end = markers(name)
            before, _, rest = README.read_text().partition(begin)
            README.write_text(before + begin + block + end + rest.partition(end)[2])
        else:
            print(block)


if __name__ == "__main__":
    main()
