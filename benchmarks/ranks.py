"""Two ranks of one thread against one process of two threads, on the speedrun's RL.

    python benchmarks/ranks.py runs/speedrun/base               speed: short runs in turn, medians
    python benchmarks/ranks.py runs/speedrun/base --whole       and a run on the ranks to its end, with an examination

Both sample the same problems with the same seeds. Speed is trained samples per second of whole steps, evaluations and saves left
out. The examination samples the 1,200 held-out problems at temperature 1, as the speedrun does. Writes
benchmarks/results/ranks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine
from result_files import write_results

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.config.packaged import packaged_environment
from nmoe.runs.ledger import read_metrics
from nmoe.speedrun.scratch_report import examine

RESULTS = Path(__file__).parent / "results" / "ranks.json"
# The first steps load code and fill caches.
SKIPPED = 3


def train(base: Path, directory: Path, name: str, ranks: int, threads: int, *overrides: str) -> list[dict[str, Any]]:
    """Trains and returns the metrics of all steps."""
    processes = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *processes, "-m", "nmoe", "rl", "train", "speedrun", f"--model.path={base.absolute()}"]
    places = [f"--run.directory={directory}", f"--run.name={name}", f"--run.threads={threads}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run([*command, *places, *overrides], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return read_metrics(directory / name)


def samples_per_second(metrics: list[dict[str, Any]], samples: int) -> float:
    return samples / statistics.median(row["time_step_s"] for row in metrics[SKIPPED:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("base", type=Path, help="the speedrun's base")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="steps of a short run")
    parser.add_argument("--rounds", type=int, default=3, help="short runs of each kind")
    parser.add_argument("--whole", action="store_true", help="a run on the ranks to its end, too")
    arguments = parser.parse_args()
    ranks, steps = arguments.ranks, f"--run.steps={arguments.steps}"
    result: dict[str, Any] = {"benchmark": "ranks", "date": time.strftime("%Y-%m-%d"), **machine()}
    with tempfile.TemporaryDirectory() as place:
        directory, speeds, rows = Path(place), {"one process": [], f"{ranks} ranks": []}, []
        batch = load_run(Path("speedrun"), RLConfig).batch
        samples = batch.prompts_per_step * batch.group_size
        for number in range(arguments.rounds):
            for kind, count, threads in (("one process", 1, ranks), (f"{ranks} ranks", ranks, 1)):
                name = f"{kind.replace(' ', '_')}_{number}"
                metrics = train(arguments.base, directory, name, count, threads, steps)
                speeds[kind].append(round(samples_per_second(metrics, samples), 1))
                rows += metrics if count > 1 else []
                print(f"{kind}: {speeds[kind][-1]} samples/s", flush=True)
        medians = {kind: statistics.median(values) for kind, values in speeds.items()}
        result["samples_per_second"] = speeds
        result["ratio"] = round(medians[f"{ranks} ranks"] / medians["one process"], 3)
        if arguments.whole:
            began = time.monotonic()
            whole = train(arguments.base, directory, "whole", ranks, 1)
            rows += whole
            config = load_run(directory / "whole" / "config.toml", RLConfig)
            longer = packaged_environment("skills_longer")
            found = examine("whole", directory / "whole/checkpoints/best", config, longer, config.run.seed).sampled[0]
            result["whole"] = {
                "steps": len(whole),
                "wall_s": round(time.monotonic() - began),
                "held_out": round(found.value, 4),
                "problems": found.problems,
            }
    result["mismatch_abs_mean"] = max(row["mismatch_abs_mean"] for row in rows)
    result["mismatch_abs_max"] = max(row["mismatch_abs_max"] for row in rows)
    write_results(RESULTS, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
