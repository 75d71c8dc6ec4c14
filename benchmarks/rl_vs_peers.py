"""Seconds per RL step of nmoe against verl, slime or prime-rl, on a GPU: one workload, each side in its own keys.

    python benchmarks/rl_vs_peers.py verl --model DIR --python VERL/bin/python
    python benchmarks/rl_vs_peers.py slime --model DIR --python SLIME/bin/python --directory slime
    python benchmarks/rl_vs_peers.py prime-rl --model DIR --python PRIME/.venv/bin/python --directory prime-rl

A step samples 32 x 8 completions of up to 512 tokens, grades them and takes one update. nmoe's settings come from the peer's launch
(`nmoe config import`), but for the engine: nmoe samples with its own, in the process that trains, on one GPU; verl and slime have
theirs on the same GPU, prime-rl on a second one, at once with training. Each round runs both sides for few and for many steps, in
turn: their difference is free of the start. Medians over rounds; the last line is one JSON object. Without a GPU, or the peer's
package, one message says what is missing, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peer_launches import PEERS, REWARD, Peer, Workload

from nmoe.config.launches.command import imported
from nmoe.config.launches.convert import nested
from nmoe.config.toml import toml_value

# The engine is nmoe's own; the pool and its grader are the workload's.
LEFT_OUT = ("engine.", "placement.", "async.", "environment.", "sinks.", "eval.")


def missing(name: str, peer: Peer, python: str | None, directory: Path | None, model: Path) -> list[str]:
    """Returns what the comparison needs and this machine lacks."""
    found = []
    if (gpus := torch.cuda.device_count()) < peer.gpus:
        found.append(f"{peer.gpus} CUDA GPU{'s' * (peer.gpus > 1)} (found {gpus})")
    if not (model / "config.json").is_file():
        found.append(f"a checkpoint of Qwen3-0.6B in --model={model}")
    if directory is not None and not directory.is_dir():
        found.append(f"--directory={directory}, which is no directory")
    command = [python or "python", "-c", f"import {peer.package}"]
    program = shutil.which(command[0])
    if program is None or subprocess.run(command, capture_output=True, check=False, cwd=directory or None).returncode:
        found.append(f"{name}: {peer.needs}")
    return found


def write_data(directory: Path) -> None:
    """Writes sums as each trainer reads them, and the reward."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for number in range(4096):
        first, second = number % 64, number // 64
        message = [{"role": "user", "content": f"What is {first} + {second}? End with the number."}]
        label = str(first + second)
        truth = {"style": "rule", "ground_truth": label}
        rows.append({"prompt": message, "label": label, "data_source": "sums", "reward_model": truth})
    with (directory / "train.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    pq.write_table(pa.Table.from_pylist(rows), directory / "train.parquet")
    (directory / "reward.py").write_text(REWARD)


def own_configuration(launch: str, data: Path) -> dict[str, Any]:
    """Returns nmoe's tables for a peer's launch, with the workload's problems and nmoe's own engine."""
    values = {key: value for key, value in imported(launch).values.items() if not key.startswith(LEFT_OUT)}
    tables = nested(values)
    tables.setdefault("algorithm", {})["correction"] = "none"
    tables["model"] |= {"device": "cuda", "precision": "bfloat16"}
    tables["run"] |= {"directory": str(data / "out"), "name": "nmoe", "resume": False}
    pool = {"type": "jsonl", "path": str(data / "train.jsonl"), "problem_field": "prompt", "answer_field": "label"}
    tables["environment"] = {"env_id": "sums", "task": "math", "extraction": "prose", "task_pool": pool}
    return tables


def written(tables: dict[str, Any], above: str = "") -> str:
    """Returns tables as TOML."""
    own = [f"{key} = {toml_value(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    below = [written(value, f"{above}{key}.") for key, value in tables.items() if isinstance(value, dict)]
    return "\n".join([*([f"[{above[:-1]}]"] if above else []), *own, *below]) + "\n"


def timed(words: list[str], directory: Path | None) -> float:
    """Runs a command to its end, and returns its seconds. What it prints goes to stderr."""
    began = time.perf_counter()
    subprocess.run(words, check=True, cwd=directory, stdout=sys.stderr)
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--model", type=Path, required=True, help="a directory with Qwen3-0.6B")
    parser.add_argument("--python", help="the peer's interpreter (default: python)")
    parser.add_argument("--directory", type=Path, help="the peer's checkout, where it needs one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(2, 10), metavar=("FEW", "MANY"))
    given = parser.parse_args(arguments)
    peer, (few, many) = PEERS[given.peer], given.steps
    if given.rounds < 1 or not 1 <= few < many:
        parser.error("--rounds must be at least 1, and --steps two rising numbers of at least 1")
    if lacking := missing(given.peer, peer, given.python, given.directory, given.model):
        print(f"rl_vs_peers: needs {'; '.join(lacking)}", file=sys.stderr)
        return 2
    seconds: dict[str, list[float]] = {"nmoe": [], given.peer: []}
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        write_data(data)
        os.environ["PYTHONPATH"] = f"{data}:{os.environ.get('PYTHONPATH', '')}"  # reward.py
        work = Workload(given.model.resolve(), data, many)
        (data / "nmoe.toml").write_text(written(own_configuration(peer.launch(work), data)))
        for number in range(given.rounds):
            taken: dict[str, list[float]] = {side: [] for side in seconds}
            for steps in (few, many):
                words = shlex.split(peer.launch(replace(work, steps=steps)))
                start = [given.python or "python", *words[1:]] if words[0] == "python" else words
                own = [sys.executable, "-m", "nmoe", "rl", "train", str(data / "nmoe.toml"), f"--run.steps={steps}"]
                taken[given.peer].append(timed(start, given.directory))
                taken["nmoe"].append(timed([*own, f"--run.name=nmoe-{number}-{steps}"], None))
            for side, (short, long) in taken.items():
                seconds[side].append((long - short) / (many - few))
            print(
                f"round {number}: " + ", ".join(f"{side} {each[-1]:.2f} s" for side, each in seconds.items()),
                flush=True,
            )
    medians = {side: round(statistics.median(each), 3) for side, each in seconds.items()}
    about = {
        "gpu": torch.cuda.get_device_name(),
        "rounds": given.rounds,
        "steps": [few, many],
        "launch": peer.launch(work),
    }
    print(json.dumps({"seconds_per_step": medians, "each": seconds, **about}, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
