"""What every check here does: holds figures against their bounds, and where one is out of them shows what the run left behind."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

SHOWN_SAMPLES = 6
SHOWN_STEPS = 12
SHOWN_ALERTS = 5


def hold(figures: Mapping[str, tuple[float, float, float]], runs: Sequence[Path]) -> NoReturn:
    """Prints each figure with its bounds, `{name: (value, low, high)}`, and ends the program: with 1, after the traces of `runs`,
    where one is out of them. Not a number is out of any bounds."""
    broken = 0
    for name, (value, low, high) in figures.items():
        holds = low <= value <= high
        broken += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {name} = {value:.6g}, wanted {low:g} to {high:g}")
    if broken:
        for run in runs:
            show(run)
    sys.exit(1 if broken else 0)


def show(run: Path) -> None:
    """The course of a run, its alerts and its last samples."""
    print(f"\n== {run}")
    provenance = json.loads((run / "provenance.json").read_text())
    print(json.dumps({key: provenance.get(key) for key in ("cpu", "threads", "torch", "seed")}))
    steps = _lines(run / "metrics.jsonl")
    names = (
        "step",
        "loss",
        "reward_mean",
        "correctness",
        "format_ok",
        "tool_use_ok",
        "curriculum_stage",
        "held_out_loss",
    )
    for step in steps[:: max(1, len(steps) // SHOWN_STEPS)] + steps[-1:]:
        print({name: round(step[name], 4) for name in names if name in step})
    for alert in _lines(run / "alerts.jsonl")[-SHOWN_ALERTS:]:
        print(f"alert, step {alert['step']}: {alert['message']}")
    for evaluation in sorted((run / "eval").glob("*.json"))[-2:]:
        found = json.loads(evaluation.read_text())["results"]
        print(
            evaluation.name, [{key: one[key] for key in ("mode", "dataset", "value", "low", "high")} for one in found]
        )
    for file in sorted((run / "samples").glob("*.jsonl"))[-1:]:
        samples = _lines(file)
        print(f"{file.name}: {dict(Counter(sample['failure'] for sample in samples))}")
        for sample in samples[:SHOWN_SAMPLES]:
            told = {
                name: sample[name] for name in ("question", "gold", "answer", "verdict", "failure", "reward", "text")
            }
            print(json.dumps(told, ensure_ascii=False))


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
