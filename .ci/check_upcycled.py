"""Holds the report of a mixture's run, or what benchmarks/upcycled.py recorded, against what is promised:

python .ci/check_upcycled.py runs/speedrun/real_moe
python .ci/check_upcycled.py
"""

import json
import sys
from math import inf
from pathlib import Path

from holding import hold

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from upcycled import EQUAL, ROUTING, compared_with_dense, read, routing

# The lower bound of the paired interval over all held-out problems of a seed, and megabytes.
WORST_LOSS = -0.05
MOST_MB = 10240

if runs := [Path(argument) for argument in sys.argv[1:]]:
    (run,) = runs
    found, report = routing(run), (run / "report.md").read_text()
    last = json.loads((run / "routing.jsonl").read_text().splitlines()[-1])["shares"]
    header = next(line for line in report.splitlines() if line.startswith("| task | expert 0 |"))
    hold(
        {
            "experts in the report's table": (header.count("expert "), 4, 4),
            "tasks in it": (sum(f"\n| {task} | " in report.partition(header)[2] for task in last), 3, 3),
            **{f"curve of {name}": ((run / f"plots/{name}.png").exists(), 1, 1) for name in ROUTING},
            "divergence of tasks, end over start": (
                found["last_expert_load_divergence"] / found["first_expert_load_divergence"],
                1,
                inf,
            ),
        },
        [run],
    )
records = read()
trained = compared_with_dense(records)
if not trained:
    sys.exit("no mixture of this recipe was trained; run benchmarks/upcycled.py")
figures = {"seeds": (len(trained), 3.0, inf)}
for record in records:
    for experts in EQUAL:
        figures[f"seed {record['seed']}: logits that {experts} experts change"] = (
            record[f"logits_different_{experts}"],
            0,
            0,
        )
for record in trained:
    seed = record["seed"]
    figures[f"seed {seed}: held-out problems"] = (record["problems_all"], 600, inf)
    figures[f"seed {seed}: mixture less dense, lower bound"] = (record["difference_all_low"], WORST_LOSS, 1)
    figures[f"seed {seed}: memory in MB"] = (record["peak_memory_mb"], 0, MOST_MB)
hold(figures, [])
