"""Counts false alarms of the referee: rounds with a new seed each, over nmoe's own server, which has none of the faults:

    python .ci/referee_clean.py [--rounds 1000] [--first 0] [--into FILE] [--json FILE]

One round in twenty is held whole and alone, with the deadline that users have. Of the others several make their checks at once, so
that the server samples for all of them in one step, which is most of the cost. Checks that need the server for themselves are then
made of one round after another: publications, after which it has its first weights again, and one that waits until no request runs.
Rounds that FILE has already are not held again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from forked import ended_cpu_s
from referee_servers import MODELS, SHARED_S, drawn_checkpoint, serving

from nmoe.referee.checks import CATALOGUE
from nmoe.referee.command import judge_of
from nmoe.referee.judge import Judge
from nmoe.referee.rounds import Outcome, Round, hold

# Rounds at once, and of one server, before the next model's turn.
_AT_ONCE, _EACH = 8, 24
# Of so many rounds one is held whole.
_WHOLE = 20
ALONE = [one.name for one in CATALOGUE if one.name.startswith("publishes.") or one.name == "aborts.client"]
BESIDE = [one.name for one in CATALOGUE if one.name not in ALONE]


async def held(url: str, judges: Sequence[Judge], seeds: Sequence[int]) -> AsyncIterator[tuple[int, list[Outcome]]]:
    """Holds a round for each seed and judge, and yields the outcomes of all checks of each."""

    async def part(judge: Judge, seed: int, only: Sequence[str], follows: Round | None = None) -> Round:
        return await hold(url, judge, seed=seed, publish=True, only=only, deadline_s=SHARED_S, follows=follows)

    for seed in filter(is_whole, seeds):
        yield seed, (await hold(url, judges[0], seed=seed, publish=True)).outcomes
    rounds = list(zip(judges, itertools.filterfalse(is_whole, seeds), strict=False))
    beside = await asyncio.gather(*(part(judge, seed, BESIDE) for judge, seed in rounds))
    for (judge, seed), first in zip(rounds, beside, strict=True):
        yield seed, first.outcomes + (await part(judge, seed, ALONE, first)).outcomes


def is_whole(seed: int) -> bool:
    return seed % _WHOLE == 0


def row_of(seed: int, model: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "seed": seed,
        "model": model,
        "whole": is_whole(seed),
        "seen": [f"{one.check.name}: {it.fault}: {it.seen}" for one in outcomes for it in one.findings],
        "late": [f"{one.check.name}: {one.why}" for one in outcomes if one.state == "late"],
        "ok": sum(one.state == "ok" for one in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--into", type=Path, help="a file of one line for each round")
    parser.add_argument("--json", type=Path, help="a file for the counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if options.into is not None and options.into.exists():
        rows = [json.loads(line) for line in options.into.read_text().splitlines()]
    before = len(rows)
    left = sorted(set(range(options.first, options.first + options.rounds)) - {row["seed"] for row in rows})

    async def waves(url: str, judges: Sequence[Judge], seeds: Sequence[int], model: str) -> None:
        for start in range(0, len(seeds), _AT_ONCE):
            async for seed, outcomes in held(url, judges, seeds[start : start + _AT_ONCE]):
                rows.append(row := row_of(seed, model, outcomes))
                if options.into is not None:
                    with options.into.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                if row["seen"] or row["late"]:
                    print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for number, seeds in itertools.groupby(left, lambda seed: seed // _EACH):
            model = MODELS[number % len(MODELS)]
            checkpoint = drawn_checkpoint(Path(scratch) / f"{model}_{number}", model, seed=number)
            judges = [judge_of(checkpoint, "float32")[0] for _ in range(_AT_ONCE)]
            with serving(checkpoint) as url:
                asyncio.run(waves(url, judges, list(seeds), model))
    alarms, late = sum(bool(row["seen"]) for row in rows), sum(bool(row["late"]) for row in rows)
    checks, took = sum(row["ok"] for row in rows) / max(1, len(rows)), os.times()
    cpu_s = (took.user + took.system, ended_cpu_s())
    whole = sum(row["whole"] for row in rows)
    print(
        f"{alarms} false alarms and {late} with a late check in {len(rows)} rounds, {whole} whole, of {checks:.1f} checks"
    )
    if options.json is not None:
        of_models = {model: sum(row["model"] == model for row in rows) for model in MODELS}
        counts = {
            "rounds": len(rows),
            "with_false_alarms": alarms,
            "with_late_checks": late,
            "whole": whole,
            "of_models": of_models,
        }
        options.json.write_text(json.dumps(counts | {"checks_of_a_round": round(checks, 1)}, indent=1) + "\n")
    if count := len(rows) - before:
        print(f"{cpu_s[0] / count:.2f} CPU s a round, and {cpu_s[1] / count:.2f} of the servers, with all starts")
    sys.exit(alarms > 0)


if __name__ == "__main__":  # a forked server imports this module
    main()
