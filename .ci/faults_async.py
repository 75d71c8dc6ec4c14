"""Runs with [placement] whose processes are killed or hang at random moments, and which have to go on as if nothing had been:

    python .ci/faults_async.py [--moments 20] [--quick] [--only KIND] [--json FILE]

Every second run samples beside its training ([async] max_staleness = 1). The others use exact numerics and one step's samples at a
time, and have to leave the metrics and the weights of an undisturbed run: no position of the pool was lost or trained on twice. For
runs beside the training the account of the last checkpoint has to name each position once, and each step's tokens have to add
up. An engine has to serve again within one start and one publication, where a hung one is noticed after HUNG_S. `--quick` is one
moment of two kinds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "scripts"), str(Path(__file__).parents[1] / "tests/engine/remote")]

from commits import ROOT, environment
from faulty_proxy import FaultyProxy
from same_numbers import is_timing
from tiny_run import make_workshop

from nmoe.engine.remote.launcher import LocalLauncher
from nmoe.engine.remote.process import ServerProcess
from nmoe.engine.remote.wire import GENERATE

KINDS = (
    *("engine killed", "engine hung", "engine killed in a transfer", "training killed"),
    *("rank killed", "parent killed", "disk full", "late and doubled answers"),
)
QUICK = ("engine killed in a transfer", "training killed")
STEPS, HUNG_S, SLACK_S, LIMIT_S = 8, 4.0, 15.0, 600.0
CONFIG = f"""
[run]
directory = "."
steps = {STEPS}
threads = 1
[model]
path = "base"
numerics = "exact"
[environment]
path = "reverse.toml"
[sampling]
max_new_tokens = 20
[batch]
prompts_per_step = 6
group_size = 6
max_refills = 1
[optimizer]
learning_rate = 2.5e-3
eps = 1e-2
[engine]
kind = "server"
args = ["--threads", "1"]
token_s = 0.2
[checkpoint]
every_steps = 2
keep = 2
"""
PLACED = ("--placement.engines=2", f"--placement.hung_s={HUNG_S}", "--placement.restarts=5", "--placement.wait_s=300")
# What depends on the engines that were there at the time.
OF_ENGINES = ("publish", "canary", "engine", "time_", "tokens_per_second", "mismatch_abs_mean/")


class Run:
    """A run in `workshop`, with its parent's process."""

    def __init__(self, workshop: Path, name: str, *overrides: str) -> None:
        self.path, self._workshop, self._name, self._overrides = workshop / name, workshop, name, overrides
        shutil.rmtree(self.path, ignore_errors=True)  # of an earlier call with this workshop
        self.start()

    def start(self, *more: str) -> None:
        command = [sys.executable, "-m", "nmoe.rl", "train", "placed.toml", f"--run.name={self._name}"]
        with (self._workshop / f"{self._name}.txt").open("ab") as said:
            self.process = subprocess.Popen(
                [*command, *self._overrides, *more], cwd=self._workshop, env=environment(ROOT), stdout=said, stderr=said
            )

    def end(self) -> int:
        """Waits for the end, kills what outlasts the limit, and returns the exit code."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return -1

    def steps(self) -> int:
        file = self.path / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait(self, holds: Callable[[], object]) -> float:
        """Waits until something holds or the run ends; returns the seconds."""
        began = time.monotonic()
        while not holds() and self.process.poll() is None and time.monotonic() - began < LIMIT_S:
            time.sleep(0.005)
        return time.monotonic() - began

    def processes(self, role: str) -> list[int]:
        """Returns the ids of processes that train ("train") or sample ("server"), in the order of their start."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = process.joinpath("cmdline").read_text().split("\0")
                environ = process.joinpath("environ").read_text()
                parent = int(process.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if f"FAULTS_RUN={self.path}" not in environ.split("\0") or "keeper.py" in " ".join(words[:5]):
                continue
            wanted = "nmoe.engine.server" in words if role == "server" else any("--engine.urls" in one for one in words)
            if wanted and parent != 1:
                found.append(int(process.name))
        return sorted(found)

    def log(self, name: str = "log.txt") -> str:
        file = self.path / name
        return file.read_text() if file.exists() else ""


def left(run: Path) -> dict[str, Any]:
    """Returns what a run leaves that must not depend on faults."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = run / "checkpoints/latest"

    def depends(name: str) -> bool:
        return is_timing(name) or name.startswith(OF_ENGINES)

    return {
        **{f"step {row['step']}": {k: v for k, v in row.items() if not depends(k)} for row in rows},
        **{f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(weights.glob("*.safetensors"))},
    }


def faults_of_account(run: Path) -> list[str]:
    """Returns what is wrong with the account of a run that samples beside its training."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [] if [row["step"] for row in rows] == [*range(1, STEPS + 1)] else ["steps are missing or doubled"]
    for row in rows:
        if row["tokens_sampled"] < row["tokens_trained"] + row["tokens_void"]:
            found.append(f"step {row['step']}: more tokens ended than were sampled")
    state = json.loads((run / "checkpoints/latest/state.json").read_text())["tickets"]
    ended = state["trained"] + sum(state["void"].values())
    if ended + len(state["outstanding"]) != state["next"]:
        found.append(f"{ended} groups ended and {len(state['outstanding'])} are outstanding, of {state['next']}")
    if len(set(state["outstanding"])) != len(state["outstanding"]):
        found.append("a position is outstanding twice")
    return found


def strike(kind: str, run: Run, draw: random.Random, start_s: float) -> list[str]:
    """Does what the fault is, and returns what is wrong with the recovery."""
    after = draw.randrange(1, STEPS - 2)
    run.wait(lambda: run.steps() >= after)
    time.sleep(draw.uniform(0, 0.5))
    if kind == "rank killed" or kind == "training killed":
        os.kill(draw.choice(run.processes("train")), signal.SIGKILL)
    elif kind == "disk full":
        (training,) = run.processes("train")
        resource.prlimit(training, resource.RLIMIT_FSIZE, (draw.randrange(1000, 300_000),) * 2)
    elif kind == "parent killed":
        run.process.kill()
        run.process.wait()
        until = time.monotonic() + SLACK_S
        while (still := run.processes("train") + run.processes("server")) and time.monotonic() < until:
            time.sleep(0.1)
        run.start("--run.resume=true")
        return [f"processes outlive their parent: {still}"] if still else []
    else:
        if kind == "engine killed in a transfer":
            before = {one.name for one in Path("/dev/shm").glob("nmoe_weights_*")}
            run.wait(lambda: {one.name for one in Path("/dev/shm").glob("nmoe_weights_*")} - before)
            time.sleep(draw.uniform(0, 0.02))
        served = run.log("engines/parent.log").count("server_0 healthy, server_1 healthy")
        os.kill(draw.choice(run.processes("server")), signal.SIGSTOP if kind == "engine hung" else signal.SIGKILL)
        took = run.wait(lambda: run.log("engines/parent.log").count("server_0 healthy, server_1 healthy") > served)
        most = start_s * 2 + SLACK_S + (HUNG_S if kind == "engine hung" else 0.0)
        if run.process.poll() is None and took > most:
            return [f"the engine serves again after {took:.1f} s, where a start took {start_s:.1f} s"]
    return []


def answers(workshop: Path, name: str, overrides: list[str], draw: random.Random) -> tuple[int, Run]:
    """Runs over two servers behind proxies, whose answers come late and twice at random."""

    def fault(path: str, number: int) -> Any:
        return draw.choice(("late", "twice")) if path == GENERATE and draw.random() < 0.05 else None

    logs = LocalLauncher(workshop / f"{name}_servers")
    checkpoint = str((workshop / "base/checkpoints/latest").resolve())
    options = ("--port", "{port}", "--numerics", "exact", "--precision", "float32", "--device", "cpu", "--threads", "1")
    command = [sys.executable, "-m", "nmoe.engine.server", checkpoint, *options]
    proxies = [FaultyProxy(ServerProcess(f"server_{n}", command, {}, logs), fault, 1.0) for n in range(2)]
    try:
        urls = json.dumps([proxy.start() for proxy in proxies])
        run = Run(workshop, name, f"--engine.urls={urls}", "--engine.wait_s=60", *overrides)
        return run.end(), run
    finally:
        for proxy in proxies:
            proxy.stop()


def moment(kind: str, number: int, workshop: Path, whole: dict[str, Any], start_s: float, seed: int) -> dict[str, Any]:
    draw, beside = random.Random(f"{seed} {kind} {number}"), number % 2 == 1
    name = f"{kind.replace(' ', '_')}_{number}"
    overrides = ["--async.max_staleness=1"] if beside else []
    os.environ["FAULTS_RUN"] = str(workshop / name)
    wrong: list[str] = []
    began = time.monotonic()
    if kind == "late and doubled answers":
        code, run = answers(workshop, name, overrides, draw)
    else:
        ranks = ["--placement.learner_gpus=2"] if kind == "rank killed" else []
        run = Run(workshop, name, *PLACED, *overrides, *ranks)
        wrong += strike(kind, run, draw, start_s)
        code = run.end()
    if code:
        wrong.append(f"the run ended with {code}: {(workshop / f'{name}.txt').read_text()[-300:]}")
    elif beside or kind == "rank killed":  # ranks round otherwise
        wrong += faults_of_account(run.path)
    else:
        found = left(run.path)
        wrong += [f"{key} differs" for key in sorted(found.keys() | whole.keys()) if found.get(key) != whole.get(key)]
    return {
        "kind": kind,
        "moment": number,
        "beside": beside,
        "took_s": round(time.monotonic() - began, 1),
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workshop", type=Path, help="a directory with what scripts/tiny_run.py makes")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    kinds = (arguments.only,) if arguments.only else QUICK if arguments.quick else KINDS
    done = []
    with tempfile.TemporaryDirectory() as directory:
        workshop = arguments.workshop or Path(directory)
        if not (workshop / "base").exists():
            make_workshop(ROOT, workshop)
        (workshop / "placed.toml").write_text(CONFIG)
        os.environ["FAULTS_RUN"] = str(workshop / "whole")
        undisturbed = Run(workshop, "whole", *PLACED)
        start_s = undisturbed.wait(
            lambda: "server_0 healthy, server_1 healthy" in undisturbed.log("engines/parent.log")
        )
        if undisturbed.end():
            print((workshop / "whole.txt").read_text()[-2000:], file=sys.stderr)
            return 1
        whole = left(undisturbed.path)
        for number in range(1 if arguments.quick else arguments.moments):
            for kind in kinds:
                done.append(moment(kind, number, workshop, whole, start_s, arguments.seed))
                print(json.dumps(done[-1]), flush=True)
    right = {kind: sum(not one["wrong"] for one in done if one["kind"] == kind) for kind in kinds}
    record = {"moments": len(done) // len(kinds), "start_s": round(start_s, 1), "right": right, "done": done}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(right))
    return int(any(one["wrong"] for one in done))


if __name__ == "__main__":
    sys.exit(main())
