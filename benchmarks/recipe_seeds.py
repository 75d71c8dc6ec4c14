"""Runs the documented recipes from several seeds, on what `./speedrun.sh` leaves: median and worst of what they promise.

    python benchmarks/recipe_seeds.py                             every recipe, five seeds each
    python benchmarks/recipe_seeds.py --recipes verifier --seeds 3 4
    python benchmarks/recipe_seeds.py --show                      only print what was measured so far

Self-play has its own (benchmarks/selfplay.py). Results are kept in benchmarks/results/recipe_seeds.json with processor, calibration
(benchmarks/calibration.py), threads and seconds; what is there, of the same configuration, is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration import calibration_s
from machine import machine, versions
from speedrun_seeds import as_measured

from nmoe.config.packaged import CONFIGS, ENVIRONMENTS
from nmoe.config.tables.sandbox import SandboxSettings
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.evaluate import evaluate
from nmoe.model.checkpoint import load_model
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/recipe_seeds.json"
SPEEDRUN = ROOT / "runs/speedrun"
SEEDS = range(5)

Record = dict[str, Any]


def sampled_correctness(run: Path, environment: str, max_new_tokens: int) -> float:
    """Of 200 held-out problems with eight samples each, at temperature 1."""
    directory = resolve_checkpoint(run)
    tokenizer, model = Tokenizer.load(directory), load_model(directory)
    held_out = Environment.from_toml(ENVIRONMENTS / f"{environment}.toml", tokenizer).held_out()
    with ToolRuntime(held_out, SandboxSettings()) as runtime:
        results = evaluate(
            NativeEngine(model, 256),
            held_out,
            model.config.context_tokens,
            problems=200,
            samples=8,
            temperature=1.0,
            max_new_tokens=max_new_tokens,
            seed=0,
            runtime=runtime,
        )
    return results[0].value


def stages_opened(run: Path) -> float:
    return max(row["curriculum_stage"] for row in read_metrics(run)) + 1


def stage_by_stage(run: Path) -> Record:
    """The step at which each stage but the first opened; and, over ten steps before the last one opened and the last ten, how long
    a completion was, its calls, the share of right answers, and the tokens that were sampled for each right answer."""
    rows = read_metrics(run)
    stages = range(1, int(stages_opened(run)))
    opened = [next(place for place, row in enumerate(rows) if row["curriculum_stage"] == stage) for stage in stages]

    def over(part: Sequence[Mapping[str, float]]) -> dict[str, float]:
        length, calls, right = (
            statistics.fmean(row[name] for row in part)
            for name in ("response_length_mean", "tool_calls_mean", "correctness")
        )
        return {"tokens": length, "calls": calls, "correctness": right, "tokens_per_right_answer": length / right}

    before, after = rows[max(0, opened[-1] - 10) : opened[-1]], rows[-10:]
    return {"opened_at_step": [place + 1 for place in opened], "before_last": over(before), "at_end": over(after)}


@dataclass(frozen=True)
class Recipe:
    """What makes a run of a seed, and the figure that it is judged by. `before` runs once for all seeds, each command where the run
    or file that it is said to make is missing. `more` is kept beside the figure. The configuration is that of the recipe's name, or
    another one with overrides."""

    verb: tuple[str, ...]
    figure: Callable[[Path], float]
    wanted: float
    before: tuple[tuple[str, tuple[str, ...]], ...] = ()
    more: Callable[[Path], Record] = lambda _: {}
    configuration: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def configurations(self) -> list[str]:
        """The names of the packaged configurations that its result depends on, but for its own and the base's."""
        return [command[1] for _, command in self.before if command[0] == "pretrain"]


def last(name: str) -> Callable[[Path], float]:
    return lambda run: [row[name] for row in read_metrics(run) if name in row][-1]


PAIRS = (
    "pairs.jsonl",
    (
        *("data", "pairs", "runs/speedrun/base", "skills", "runs/speedrun/pairs.jsonl"),
        *("--problems", "4000", "--samples", "6"),
    ),
)
TOOLS_BASE = ("tools_base", ("pretrain", "tools_base"))
STAGES_BASE = ("five_stages_base", ("pretrain", "five_stages_base"))
RECIPES: Mapping[str, Recipe] = {
    "sort_grpo": Recipe(("rl", "train"), lambda run: sampled_correctness(run, "sort", 48), 0.9),
    "sort_ppo": Recipe(("rl", "train"), lambda run: sampled_correctness(run, "sort", 48), 0.9),
    "tools": Recipe(
        ("rl", "train"),
        lambda run: sampled_correctness(run, "tools", 96),
        0.9,
        (TOOLS_BASE,),
    ),
    "five_stages": Recipe(("rl", "train"), stages_opened, 5, (TOOLS_BASE, STAGES_BASE), stage_by_stage),
    "verifier": Recipe(("verifier",), last("verifier_f1"), 0.9),
    "fp8": Recipe(
        ("rl", "train"),
        lambda run: sampled_correctness(run, "skills", 48),
        0.9,
        configuration="speedrun",
        overrides=("--model.expert_profile=fp8",),
    ),
    "dpo": Recipe(("dpo",), last("held_out_accuracy"), 0.93, (PAIRS,)),
    "reward": Recipe(("reward",), last("held_out_accuracy"), 0.85, (PAIRS,)),
}


def nmoe(*arguments: str) -> None:
    """Runs a command of nmoe's in a process of its own; ends this one where it fails."""
    command = [sys.executable, "-c", "from nmoe.cli import main; main()", *arguments]
    if code := subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode:
        sys.exit(f"nmoe {' '.join(arguments)} ended with {code}")


def configuration(name: str) -> str:
    """12 hexadecimal digits over the values of the recipe's configuration and the base's, however their files are written."""
    recipe = RECIPES[name]
    names = [recipe.configuration or name, "speedrun_base", *recipe.configurations]
    settings: list[Any] = [as_measured(tomllib.loads((CONFIGS / f"{one}.toml").read_text())) for one in names]
    settings += recipe.overrides
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


def measure(name: str, seed: int) -> Record:
    """One run of a recipe."""
    recipe, run = RECIPES[name], SPEEDRUN / f"{name}_seed{seed}"
    where = machine()
    began, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if not (run / "checkpoints/latest").exists():
        place = f"--run.name={run.name}", f"--run.seed={seed}"
        nmoe(*recipe.verb, recipe.configuration or name, *place, *recipe.overrides)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "recipe": name,
        "seed": seed,
        "configuration": configuration(name),
        **where,
        **versions("torch"),
        "threads": json.loads((run / "provenance.json").read_text())["threads"],
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime, 1),
        "steps_s": round(sum(row.get("time_step_s", 0.0) for row in read_metrics(run)), 1),
        "figure": recipe.figure(run),
        "wanted": recipe.wanted,
        **recipe.more(run),
    }


def read() -> list[Record]:
    """The records of the configurations as they are now."""
    records: list[Record] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return [record for record in records if record["configuration"] == configuration(record["recipe"])]


def show(records: Sequence[Record]) -> None:
    """Median and worst of each recipe."""
    for name in RECIPES:
        figures = sorted(record["figure"] for record in records if record["recipe"] == name)
        if figures:
            seconds = [record["cpu_s"] for record in records if record["recipe"] == name]
            print(
                f"{name:10} {len(figures)} seeds: median {statistics.median(figures):.3f}, worst {figures[0]:.3f}, best "
                f"{figures[-1]:.3f} (wanted {RECIPES[name].wanted}); {statistics.median(seconds):.0f} CPU seconds"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="only these (default: 0 to 4)")
    parser.add_argument("--show", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    if not arguments.show:
        print(f"calibration: {calibration_s():.3f} CPU seconds")
        for name in arguments.recipes:
            done = {record["seed"] for record in read() if record["recipe"] == name}
            missing = [seed for seed in arguments.seeds if seed not in done]
            for made, command in RECIPES[name].before if missing else ():
                file = SPEEDRUN / made
                if not (file.is_file() or (file / "checkpoints/latest").exists()):
                    nmoe(*command)
            for seed in missing:
                record = measure(name, seed)
                records = sorted([*read(), record], key=lambda one: (one["recipe"], one["seed"]))
                RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    show(read())


if __name__ == "__main__":
    main()
