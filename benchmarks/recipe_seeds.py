"""Runs the documented recipes from several seeds, on what `./speedrun.sh --scratch` leaves: median and worst of their figures.

    python benchmarks/recipe_seeds.py                             every recipe, five seeds each
    python benchmarks/recipe_seeds.py --recipes verifier --seeds 3 4
    python benchmarks/recipe_seeds.py --show                      only print what was measured so far

Self-play has its own (benchmarks/selfplay.py). Results are kept in benchmarks/results/recipe_seeds.json with processor, calibration
(benchmarks/machine.py), threads and seconds; what is there, of the same configuration, is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from machine import calibration_s, machine, versions
from result_files import Record, read_records, write_records
from speedrun_seeds import as_measured

from nmoe.config.loader import load_environment
from nmoe.config.modes import mode_of
from nmoe.config.packaged import CONFIGS, ENVIRONMENTS
from nmoe.config.tables.pools import GeneratedPool
from nmoe.envs.pools import build_pool
from nmoe.eval.subject import open_subject
from nmoe.runs.ledger import read_metrics
from nmoe.speedrun.corpus import SKILLS, columns
from nmoe.statistics import Estimate, paired_mean_difference

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/recipe_seeds.json"
SPEEDRUN = ROOT / "runs/speedrun"
SEEDS = range(5)


def nmoe(*arguments: str) -> None:
    """Runs a command of nmoe's in a process of its own; ends this one where it fails."""
    command = [sys.executable, "-c", "from nmoe.cli import main; main()", *arguments]
    if code := subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode:
        sys.exit(f"nmoe {' '.join(arguments)} ended with {code}")


@cache
def evaluated(run: Path, environment: str, *options: str) -> dict[str, float]:
    """What `nmoe eval` says of a run's held-out problems, by mode."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.json"
        nmoe("eval", str(run), environment, *options, "--results", place, "--out", str(out))
        found = json.loads(out.read_text())["evaluations"]
    # The first is of all problems; parts of them, such as one skill's, follow.
    return {one["mode"]: one["value"] for one in found if one["dataset"] == found[0]["dataset"]}


def sampled_correctness(run: Path, environment: str, max_new_tokens: int) -> float:
    """Of 200 held-out problems with eight samples each, at temperature 1."""
    options = ("--problems", "200", "--samples", "8", "--temperature", "1", "--max-tokens", str(max_new_tokens))
    return evaluated(run, environment, *options)["sampling_pass@1"]


def best_of_8(policy: Path, environment: str, scorer: Path, problems: int) -> Record:
    """The best of eight samples by a scorer, beside what it competes with."""
    options = ("--problems", str(problems), "--samples", "8", "--temperature", "1", "--best-of", str(scorer))
    found = evaluated(policy, environment, *options)
    return {
        "greedy": found["greedy_pass@1"],
        "one_sample": found["sampling_pass@1"],
        "majority_of_8": found["sampling_pass@8"],
        "best_of_8": found["best_of@8"],
        "any_of_8": found["pass@8"],
    }


def evaluation(run: Path, place: int) -> float:
    """The first figure of one of a run's own evaluations, in order of steps."""
    return json.loads(sorted((run / "eval").iterdir())[place].read_text())["results"][0]["value"]


def write_demonstrations(path: Path) -> None:
    """Worked answers to problems of sorting of the train split, as docs/guides/sft.md writes them."""
    settings = GeneratedPool(type="generated", task_type="sort", difficulty=(4, 6), seed=7)
    with path.open("w") as file:
        for problem in {one.question: one for one in build_pool("sort", settings).take(2000)}.values():
            thought = " ".join(sorted(problem.question.removeprefix("Sort: ")))
            said = {"role": "assistant", "reasoning_content": thought, "content": problem.gold}
            file.write(json.dumps({"messages": [{"role": "user", "content": problem.question}, said]}) + "\n")


# Words of the base's that nothing needs, and how often a thought may begin with them.
RAMBLE, RAMBLES = "well let me see now", 6
THOUGHTS = {"reverse": "from the back", "sort": "smallest first"}


def teach_rambling(directory: Path) -> None:
    """Fine-tunes the speedrun's trained model on right answers to its own problems, behind thoughts that begin with more or fewer
    needless words: a model that is right, whose habit is long, and whose shortest solution is short."""
    rng, records = random.Random(0), directory.with_suffix(".jsonl")
    with records.open("w") as file:
        for name, (difficulty, _) in SKILLS.items():
            settings = GeneratedPool(type="generated", task_type=name, difficulty=difficulty, seed=7)
            for problem in {one.question: one for one in build_pool(name, settings).take(1000)}.values():
                worked = " ".join(columns(problem.question)) if name == "add" else THOUGHTS[name]
                thought = " ".join([*[RAMBLE] * rng.randint(0, RAMBLES), worked])
                said = {"role": "assistant", "reasoning_content": thought, "content": problem.gold}
                file.write(json.dumps({"messages": [{"role": "user", "content": problem.question}, said]}) + "\n")
    settings = ("epochs=2", "tokens_per_step=4096", "held_out=0.05", f"path={records}")
    nmoe(
        *("sft", "sft", "--run.directory=runs/speedrun", f"--run.name={directory.name}", "--model.path=runs/speedrun"),
        *("--optimizer.learning_rate=1e-3", *(f"--records.{one}" for one in settings)),
    )


def write_last_stage(path: Path) -> None:
    """The environment `skills` in its last stage from the first step on."""
    environment = tomllib.loads((ENVIRONMENTS / "skills.toml").read_text())
    environment["rubric"] = environment.pop("curriculum")["stages"][-1]["weights"]
    path.write_text(tomli_w.dumps(environment))


@cache
def answers(run: Path) -> list[tuple[float, float]]:
    """Of 200 held-out problems of `skills`, eight samples each at temperature 1: the share that is right, and the tokens of a right
    one in the mean, NaN where none is."""
    with open_subject(
        run, load_environment(ENVIRONMENTS / "skills.toml"), 200, on_held_out=True, max_tokens=96
    ) as subject:
        groups = subject.sample(200, mode_of(samples=8, temperature=1.0), 0)
    right = [[t.sampled_tokens for t in group.trajectories if t.grade.extras["correctness"] == 1] for group in groups]
    return [
        (len(tokens) / len(group.trajectories), statistics.fmean(tokens) if tokens else math.nan)
        for tokens, group in zip(right, groups, strict=True)
    ]


def bounds(estimate: Estimate) -> list[float]:
    """The value with the ends of its interval."""
    assert estimate.interval is not None
    return [estimate.value, estimate.interval.low, estimate.interval.high]


@cache
def shortened(run: Path) -> Record:
    """The tokens of right answers before and after the stage of efficiency, over the problems that are solved in both, how much
    shorter they became, and the share of right answers; differences with the paired 95% interval over problems."""
    before, after = answers(SPEEDRUN / "rambling"), answers(run)
    both = [(one, other) for (_, one), (_, other) in zip(before, after, strict=True) if one == one and other == other]
    tokens = paired_mean_difference(*zip(*both, strict=True))
    right = paired_mean_difference([one for one, _ in before], [one for one, _ in after])
    first, last = (statistics.fmean(column) for column in zip(*both, strict=True))
    return {
        "shorter": 1 - last / first,
        "tokens": [first, last],
        "tokens_change": bounds(tokens),
        "right": [statistics.fmean(share for share, _ in one) for one in (before, after)],
        "right_change": bounds(right),
    }


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
    """What makes a run of a seed, and the figure that it is judged by. `before` is done once for all seeds: each command, or a
    function of a path, where what it makes is missing. `more` is kept beside the figure. The configuration is that of the
    recipe's name, or another one with overrides."""

    verb: tuple[str, ...]
    figure: Callable[[Path], float]
    wanted: float
    before: tuple[tuple[str, tuple[str, ...] | Callable[[Path], None]], ...] = ()
    more: Callable[[Path], Record] = lambda _: {}
    configuration: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def configurations(self) -> list[str]:
        """The names of the packaged configurations that its result depends on, but for its own and the base's."""
        return [made[-1] for _, made in self.before if isinstance(made, tuple) and made[0] != "data"]


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
SORTS = ("sort_grpo", ("rl", "train", "sort_grpo"))
SUMS = ("sums", ("pretrain", "sums"))
VERIFIER = ("verifier", ("verifier", "verifier"))
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
    "efficiency": Recipe(
        ("rl", "train"),
        lambda run: shortened(run)["shorter"],
        0.1,
        (("rambling", teach_rambling), ("efficiency.toml", write_last_stage)),
        shortened,
        configuration="speedrun",
        overrides=(
            "--model.path=runs/speedrun/rambling",
            "--environment.path=runs/speedrun/efficiency.toml",
            "--run.steps=30",
            "--sampling.max_new_tokens=96",
            "--batch.group_size=8",
            "--batch.max_refills=0",
            "--algorithm.advantage=dr_grpo",
            "--eval=[]",
        ),
    ),
    "verifier": Recipe(("verifier",), last("verifier_f1"), 0.9),
    "fp8": Recipe(
        ("rl", "train"),
        lambda run: sampled_correctness(run, "skills", 48),
        0.9,
        configuration="speedrun",
        overrides=("--model.expert_profile=fp8",),
    ),
    "sort_distillation": Recipe(
        ("rl", "train"),
        lambda run: evaluation(run, -1),
        0.9,
        (SORTS,),
        lambda run: {
            "sampled": sampled_correctness(run, "sort", 48),
            "sampled_teacher": sampled_correctness(SPEEDRUN / "sort_grpo", "sort", 48),
        },
    ),
    "sft": Recipe(
        ("sft",),
        lambda run: evaluated(run / "checkpoints/best", "sort", "--problems", "300")["greedy_pass@1"],
        0.9,
        (("demonstrations.jsonl", write_demonstrations),),
        overrides=(
            "--run.directory=runs/speedrun",
            "--records.path=runs/speedrun/demonstrations.jsonl",
            "--records.epochs=4",
            "--records.tokens_per_step=2048",
            "--records.held_out=0.1",
            "--optimizer.learning_rate=1e-3",
        ),
    ),
    "dpo": Recipe(
        ("dpo",),
        last("held_out_accuracy"),
        0.93,
        (PAIRS,),
        lambda run: evaluated(run, "skills", "--problems", "300"),
    ),
    "reward": Recipe(
        ("reward",),
        last("held_out_accuracy"),
        0.85,
        (PAIRS,),
        lambda run: best_of_8(SPEEDRUN / "base", "skills", run, 300),
    ),
    "verifier_scores": Recipe(
        ("verifier",),
        last("verifier_accuracy"),
        0.6,
        configuration="verifier",
        overrides=("--mode=score", "--run.steps=400"),
    ),
    "sums": Recipe(
        ("pretrain",),
        lambda run: best_of_8(run, "sums", SPEEDRUN / "verifier", 400)["best_of_8"],
        0.9,
        (VERIFIER,),
        lambda run: best_of_8(run, "sums", SPEEDRUN / "verifier", 400),
    ),
    "sums_rl": Recipe(
        ("rl", "train"),
        lambda run: evaluated(run / "checkpoints/best", "sums", "--problems", "400")["greedy_pass@1"],
        0.9,
        (SUMS, VERIFIER),
        lambda run: {
            "greedy_before": evaluated(SPEEDRUN / "sums", "sums", "--problems", "400")["greedy_pass@1"],
            "sampled_at_start": read_metrics(run)[0]["correctness"],
            "steps": len(read_metrics(run)),
        },
    ),
}


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
    records = read_records(RESULTS)
    return [record for record in records if record["configuration"] == configuration(record["recipe"])]


def show(records: Sequence[Record]) -> None:
    """Median and worst of each recipe."""
    for name in RECIPES:
        figures = sorted(record["figure"] for record in records if record["recipe"] == name)
        if figures:
            seconds = [record["cpu_s"] for record in records if record["recipe"] == name]
            print(
                f"{name:17} {len(figures)} seeds: median {statistics.median(figures):.3f}, worst {figures[0]:.3f}, best "
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
                    nmoe(*command) if isinstance(command, tuple) else command(file)
            for seed in missing:
                record = measure(name, seed)
                records = sorted([*read(), record], key=lambda one: (one["recipe"], one["seed"]))
                write_records(RESULTS, records)
    show(read())


if __name__ == "__main__":
    main()
