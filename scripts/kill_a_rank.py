"""Kills one rank of a tiny RL run at random moments with SIGKILL, starts all again, and compares with an undisturbed run.

    python scripts/kill_a_rank.py --kills 10 --ranks 2 --json benchmarks/results/rank_kills.json

Two of three kills strike at a random moment of a random step, the third while a checkpoint is written.
The other ranks have to end by themselves, soon. The resumed run has to end with the same metrics but for timings, and the same
bytes in the last checkpoint. Exit code 1 if a run differs, or a rank stays.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from commits import ROOT, environment
from kill_and_resume import left
from tiny_run import NMOE, make_workshop

DEADLINE_S = 60.0
"""How long the others may take to end once a rank is killed."""

# With exact numerics no bit depends on which requests an engine has at once, which is a matter of timing between ranks.
STEPS, SAVED_EVERY = 8, 2
SETTINGS = [
    *(f"--run.steps={STEPS}", f"--checkpoint.every_steps={SAVED_EVERY}"),
    *("--checkpoint.keep=2", "--model.numerics=exact"),
]


def start(workshop: Path, ranks: int, name: str, *overrides: str) -> list[subprocess.Popen[bytes]]:
    """Starts all ranks of a run, as torchrun would, but ends none of them because another has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", NMOE, "rl", "train", "grpo.toml", f"--run.name={name}", *SETTINGS, *overrides]
    started = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (workshop / f"{name}.{rank}.txt").open("ab") as said:
            started.append(
                subprocess.Popen(command, cwd=workshop, env=environment(ROOT) | place, stdout=said, stderr=said)
            )
    return started


def end(processes: list[subprocess.Popen[bytes]], deadline_s: float) -> list[int | None]:
    """The exit codes; None for a rank that had to be killed at the deadline."""
    until, codes = time.monotonic() + deadline_s, list[int | None]()
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in processes:
        process.kill()
        process.wait()
    return codes


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The steps in a run's metrics; none where it has not come so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    rng, kills = random.Random(arguments.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as directory:
        workshop = Path(directory)
        make_workshop(ROOT, workshop)
        codes = end(start(workshop, arguments.ranks, "whole"), 600)
        if codes != [0] * arguments.ranks:
            print((workshop / "whole.0.txt").read_text()[-2000:], file=sys.stderr)
            return 1
        expected = left(workshop / "whole")
        step_s = statistics.median(row["time_step_s"] for row in rows_of(workshop / "whole"))
        for number in range(1, arguments.kills + 1):
            name, rank = f"killed{number}", rng.randrange(arguments.ranks)
            processes = start(workshop, arguments.ranks, name)
            in_save = number % 3 == 0
            step = rng.randrange(2, STEPS, SAVED_EVERY) if in_save else rng.randrange(STEPS)
            partial = workshop / name / f"checkpoints/.step_{step:06}.partial"
            # Not before the ranks have met: one that never comes is waited for.
            opened = workshop / name / "config.toml"
            while not (partial.exists() if in_save else opened.exists() and len(rows_of(workshop / name)) >= step):
                if processes[0].poll() is not None:
                    break
                time.sleep(0.002)
            time.sleep(rng.random() * (0.01 if in_save else step_s))
            was_alive, in_save = processes[rank].poll() is None, partial.exists()
            processes[rank].kill()
            killed = time.monotonic()
            codes = end(processes, DEADLINE_S)
            took = time.monotonic() - killed
            resumed_from = 0
            more = ["--run.resume=true"] if (workshop / name / "config.toml").exists() else []
            ended = end(start(workshop, arguments.ranks, name, *more), 600)
            found = left(workshop / name) if ended == [0] * arguments.ranks else {"exit codes": ended}
            differing = [key for key in sorted(found.keys() | expected.keys()) if found.get(key) != expected.get(key)]
            if (file := workshop / name / "provenance.json").exists():
                before = json.loads(file.read_text())["resumed"]
                resumed_from = before[-1]["from_step"] if before else 0
            kill = {
                "rank": rank,
                "after_step": step,
                "was_alive": was_alive,
                "in_save": in_save,
                "others_ended_s": None if None in codes else round(took, 1),
                "resumed_from": resumed_from,
                "differences": differing,
            }
            kills.append(kill)
            print(json.dumps(kill), flush=True)
    record = {
        "command": f"python scripts/kill_a_rank.py --kills {arguments.kills} --ranks {arguments.ranks} --seed {arguments.seed}",
        "identical": f"{sum(not kill['differences'] for kill in kills)} of {len(kills)}",
        "kills": kills,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(record["identical"])
    return int(any(kill["differences"] or kill["others_ended_s"] is None or not kill["was_alive"] for kill in kills))


if __name__ == "__main__":
    sys.exit(main())
