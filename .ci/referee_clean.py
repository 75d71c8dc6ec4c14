"""Counts false alarms of the referee: rounds with a new seed each, over nmoe's own server, which has none of the faults:

    python .ci/referee_clean.py [--rounds 1000] [--first 0] [--into FILE]

Rounds that FILE has already are not held again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from referee_servers import MODELS, drawn_checkpoint, serving

from nmoe.referee.command import judge_of
from nmoe.referee.rounds import hold

# Rounds of one server, before the next model's turn.
_EACH = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--into", type=Path, help="a file of one line for each round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if options.into is not None and options.into.exists():
        rows = [json.loads(line) for line in options.into.read_text().splitlines()]
    left = sorted(set(range(options.first, options.first + options.rounds)) - {row["seed"] for row in rows})
    with tempfile.TemporaryDirectory() as scratch:
        for start in range(0, len(left), _EACH):
            model = MODELS[start // _EACH % len(MODELS)]
            checkpoint = drawn_checkpoint(Path(scratch) / f"{model}_{start}", model, seed=left[start])
            judge, _ = judge_of(checkpoint, "float32")
            with serving(checkpoint) as url:
                for seed in left[start : start + _EACH]:
                    cpu = time.process_time()
                    outcomes = asyncio.run(hold(url, judge, seed=seed, publish=True)).outcomes
                    seen = [f"{one.check.name}: {it.fault}: {it.seen}" for one in outcomes for it in one.findings]
                    late = [f"{one.check.name}: {one.why}" for one in outcomes if one.state == "late"]
                    ok = sum(one.state == "ok" for one in outcomes)
                    rows.append({"seed": seed, "model": model, "seen": seen, "late": late, "ok": ok})
                    rows[-1]["cpu_s"] = round(time.process_time() - cpu, 2)
                    if options.into is not None:
                        with options.into.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
                    if seen or late:
                        print(json.dumps(rows[-1]), flush=True)
    alarms, late = sum(bool(row["seen"]) for row in rows), sum(bool(row["late"]) for row in rows)
    checks, cpu_s = (sum(row[name] for row in rows) / max(1, len(rows)) for name in ("ok", "cpu_s"))
    print(
        f"{alarms} false alarms and {late} with a late check in {len(rows)} rounds of {checks:.1f} checks; "
        f"{cpu_s:.1f} CPU s a round, without the server's"
    )
    sys.exit(alarms > 0)


main()
