"""Holds what benchmarks/real_seeds.py recorded, or the summary of one run with all tasks, against what is promised:

python .ci/check_real.py
python .ci/check_real.py runs/real_full/summary.json
"""

import json
import statistics
import sys
from pathlib import Path

from holding import hold

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from real_seeds import read, tasks

# Seconds of two idle cores, CPU seconds and megabytes.
MOST = (720, 1300, 6144)
MOST_OF_ALL_TASKS = (3600, 7200, 8192)

summaries = [Path(argument) for argument in sys.argv[1:]]
records = [json.loads(path.read_text()) for path in summaries] or read()
if not records:
    sys.exit("nothing was measured of this recipe; run benchmarks/real_seeds.py")
most = MOST_OF_ALL_TASKS if summaries else MOST
named = tasks(records[0])


def values(figure: str) -> list[float]:
    return [record.get(figure, float("nan")) for record in records]


# Comparing is mostly form, of two answers that are guessed right half the time. The others are abilities.
abilities = [
    task
    for task in named
    if task != "compare" and statistics.median(values(f"gain_{task}")) >= 0.2 and min(values(f"gain_{task}_low")) > 0
]
bounds = {
    "seeds": (len(records), len(summaries) or 5, float("inf")),
    "problems of a task, least": (
        min(record[f"problems_{task}"] for record in records for task in named),
        200,
        float("inf"),
    ),
    "compare, median": (statistics.median(values("trained_compare")), 0.9, 1.0),
    "compare, worst": (min(values("trained_compare")), 0.8, 1.0),
    "other tasks that gained 20 points, each seed beyond doubt": (len(abilities), 2, float("inf")),
    "upper bound of the worst task's gain, worst seed": (min(values("worst_gain_upper_bound")), 0.0, 1.0),
    "perplexity on lambada over the base's, worst": (max(values("perplexity_ratio")), 0.0, 1.05),
    "mismatch, of what rounding explains": (max(values("mismatch_of_bound")), 0.0, 1.0),
    "CPU seconds, median": (statistics.median(values("cpu_s")), 0, most[1]),
    "memory in MB, largest": (max(values("peak_memory_mb")), 0, most[2]),
}
if all(record.get("threads", 2) > 1 for record in records):
    bounds["seconds, median"] = (statistics.median(values("wall_s")), 0, most[0])
hold(bounds, [])
