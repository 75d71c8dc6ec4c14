"""Holds a run against bounds: `python .ci/check_run.py RUN 'first:correctness <= 0.4' 'last:correctness >= 0.9' [OTHER_RUN ...]`

`first:NAME` is a metric where it was first measured, `last:NAME` its mean over the last five steps that have it, `largest:NAME` and
`total:NAME` what they say; `eval:first` and `eval:last` are the first figure of the first and the last evaluation. Where a bound
does not hold, the course of the run is shown, and that of the other runs.
"""

import json
import re
import sys
from math import inf
from pathlib import Path
from statistics import fmean

from holding import hold

LAST_STEPS = 5


def figure(run: Path, name: str) -> float:
    kind, _, metric = name.partition(":")
    if kind == "eval":
        evaluations = sorted((run / "eval").iterdir())
        chosen = evaluations[0 if metric == "first" else -1]
        return float(json.loads(chosen.read_text())["results"][0]["value"])
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [step[metric] for step in steps if metric in step]
    if not values:
        sys.exit(f"{run}: {metric} was never measured")
    return {"first": values[0], "last": fmean(values[-LAST_STEPS:]), "largest": max(values), "total": sum(values)}[kind]


run = Path(sys.argv[1])
figures, others = {}, []
for argument in sys.argv[2:]:
    if bound := re.fullmatch(r"(\S+) (<=|>=) (\S+)", argument):
        name, sign, limit = bound.groups()
        low, high = (-inf, float(limit)) if sign == "<=" else (float(limit), inf)
        figures[name] = (figure(run, name), low, high)
    else:
        others.append(Path(argument))
hold(figures, [*others, run])
