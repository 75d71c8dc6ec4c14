"""Counts which seeded faults the referee notices, and which it names as what they are:

    python .ci/referee_faults.py [--draws 20] [--first 0] [--all] [--only FAULT] [--precision float32] [--into FILE]
        [--json FILE]

Each draw has other parameters of the fault and another seed of the checks, on one of four small models: dense and mixture of
experts, tied and untied. A round has the checks below; with --all it has every one. Draws that FILE has already are not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from referee_servers import MODELS, SHARED_S, choose, drawn_checkpoint, serving

from nmoe.referee.command import judge_of
from nmoe.referee.judge import Judge
from nmoe.referee.rounds import hold
from nmoe.types import Precision

FAULTS = (
    "stale_keys", "stale_values", "torn_update", "partial_update", "experts_swapped", "expert_stale", "experts_unpacked",
    "tied_head_stale", "logprob_shifted", "other_temperature", "other_kept_set", "missing_end", "wrong_version_span",
    "salt_ignored", "abort_ignored", "duplicated_answer", "late_answer",
)  # fmt: skip
CHECKS = (
    "logprobs.plain", "logprobs.temperature", "logprobs.both", "logprobs.kept", "ends.one", "seeds.n", "aborts.named",
    "concurrency.own", "publishes.full", "publishes.torn", "publishes.partial", "publishes.flight",
)  # fmt: skip


def able(fault: str) -> list[str]:
    """Returns the models that can have a fault."""
    if fault == "tied_head_stale":
        return [one for one in MODELS if one.endswith("_tied")]
    return [one for one in MODELS if not fault.startswith("expert") or one.startswith("moe")]


def draws(options: argparse.Namespace, model: str, done: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yields the faults and seeds of a model's draws, every fault before the next seed."""
    for seed in range(options.first, options.first + options.draws):
        for fault in options.only or FAULTS:
            its = able(fault)
            if its[seed % len(its)] == model and (fault, seed) not in done:
                yield fault, seed


def made(url: str, judge: Judge, fault: str, seed: int, checks: tuple[str, ...]) -> dict[str, Any]:
    """Holds a round over a server with a fault, and returns what it found."""
    settings = choose(url, fault, seed)
    began, cpu = time.monotonic(), time.process_time()
    round_ = asyncio.run(hold(url, judge, seed=seed, publish=True, only=checks, deadline_s=SHARED_S))
    return {
        "fault": fault,
        "seed": seed,
        "found": [name for name, _ in round_.faults()],
        "late": [one.check.name for one in round_.outcomes if one.state == "late"],
        "seen": [f"{one.check.name}: {it.fault}: {it.seen}" for one in round_.outcomes for it in one.findings],
        "settings": settings,
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", action="append", choices=FAULTS)
    parser.add_argument("--precision", choices=get_args(Precision), default="float32")
    parser.add_argument("--into", type=Path, help="a file of one line for each draw")
    parser.add_argument("--json", type=Path, help="a file for the counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if options.into is not None and options.into.exists():
        rows = [json.loads(line) for line in options.into.read_text().splitlines()]
    done = {(row["fault"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as scratch:
        for number, model in enumerate(MODELS):
            if not (left := list(draws(options, model, done))):
                continue
            checkpoint = drawn_checkpoint(Path(scratch) / model, model, seed=number)
            judge, _ = judge_of(checkpoint, options.precision)
            with serving(checkpoint, faulty=True, precision=options.precision) as url:
                for fault, seed in left:
                    rows.append(row := made(url, judge, fault, seed, () if options.all else CHECKS) | {"model": model})
                    if options.into is not None:
                        with options.into.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                    if row["found"][:1] != [fault]:
                        print(json.dumps(row, indent=1), flush=True)
    counts = {}
    for fault in options.only or FAULTS:
        its = [row for row in rows if row["fault"] == fault]
        named = sum(row["found"][:1] == [fault] for row in its)
        noticed = sum(bool(row["found"]) for row in its)
        print(f"{fault:<20} {noticed:>3} noticed, {named:>3} named, of {len(its)}")
        of_models = {model: sum(row["model"] == model for row in its) for model in MODELS}
        counts[fault] = {"rounds": len(its), "noticed": noticed, "named": named, "of_models": of_models}
    if options.json is not None:
        options.json.write_text(json.dumps(counts, indent=1) + "\n")
    noticed, named = sum(bool(row["found"]) for row in rows), sum(row["found"][:1] == [row["fault"]] for row in rows)
    cpu_s = sum(row["cpu_s"] for row in rows) / max(1, len(rows))
    print(f"{noticed} of {len(rows)} noticed, {named} named; {cpu_s:.1f} CPU s a round, without the server's")
    # Rounding of half precision hides small faults.
    least = (1.0, 0.95) if options.precision == "float32" else (0.75, 0.75)
    sys.exit(noticed < least[0] * len(rows) or named < least[1] * len(rows))


if __name__ == "__main__":  # a forked server imports this module
    main()
