"""Says whether two commits compute the same: python scripts/same_numbers.py [BEFORE [AFTER]]

The first commit pretrains a tiny base. Then both commits run short recipes from it, in turns, and the metrics.jsonl of each recipe
has to be the same, number for number, but for timings. Prints the keys that differ and the first step at which they do; exit code
1 where some do. By default AFTER is HEAD, and BEFORE the last commit before the rooms of nmoe/ were rebuilt; `.` is the working
tree.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from commits import BEFORE, checked_out, resolved, subject
from tiny_run import make_workshop, run

RECIPES = ("grpo", "dpo", "sft")

RENAMED: Mapping[str, str] = {}
"""Metrics that changed their name between the commits compared: old name to new."""

Row = Mapping[str, Any]


def is_timing(name: str) -> bool:
    """Whether a metric may differ from run to run: the group Time of docs/reference/metrics.md."""
    return name.startswith("time_") or name.endswith("per_second")


def differences(before: Sequence[Row], after: Sequence[Row]) -> Iterator[str]:
    """One line for each metric that differs, with its values at the first step where it does."""
    if len(before) != len(after):
        yield f"{len(before)} steps before, {len(after)} after"
    told: set[str] = set()
    for old, new in zip(before, after, strict=False):
        old = {RENAMED.get(name, name): value for name, value in old.items()}
        for name in sorted(old.keys() | new.keys()):
            was, now = old.get(name, "absent"), new.get(name, "absent")
            if was != now and name not in told and not is_timing(name):
                told.add(name)
                yield f"{name}: {was} before, {now} after, at step {old.get('step')}"


def read(run: Path) -> list[Row]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> int:
    before, after = map(resolved, [*sys.argv[1:], *[BEFORE, "HEAD"][len(sys.argv) - 1 :]])
    print(f"before: {subject(before)}\nafter:  {subject(after)}", flush=True)
    same = True
    with checked_out(before) as old, checked_out(after) as new, tempfile.TemporaryDirectory() as directory:
        workshop = Path(directory)
        make_workshop(old, workshop)
        for recipe in RECIPES:
            was, now = (
                read(run(tree, workshop, recipe, f"--run.directory={side}"))
                for side, tree in (("before", old), ("after", new))
            )
            found = list(differences(was, now))
            same = same and not found
            print(f"{recipe}: {len(was)} steps, " + ("the same" if not found else f"{len(found)} differences"))
            for line in found:
                print(f"  {line}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
