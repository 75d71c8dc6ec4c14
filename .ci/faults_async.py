"""Runs with [placement] whose processes are killed or hang at random moments, and which have to go on as if nothing had been:

    python .ci/faults_async.py [--moments 20] [--quick] [--only KIND] [--json FILE]

A run meets faults of one kind, one after the other, each at a random moment of a step, until it ends or as many were tried.
Every second run samples beside its training ([async] max_staleness = 1). The others have to leave the metrics and the weights of
a run without [placement] that nobody disturbed: no position of the pool was lost or trained on twice. In runs beside the
training the checkpoint's account and the journal have to name each position once, and each step's tokens have to add up. An
engine has to be seen as lost at once, or after HUNG_S where it hangs, and to serve again one publication after its start. With
--json, runs that FILE has are not made again. `--quick` disturbs one run beside its training twice, and executes it again by
`nmoe replay --train`, which has to give the same weights bit for bit.
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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / one) for one in ("scripts", "tests/engine/remote", "benchmarks")]

from commits import ROOT, environment
from faulty_proxy import FaultyProxy
from machine import machine
from replayed import ENVIRONMENT, versions
from same_numbers import is_timing

from nmoe.engine.remote.launcher import LocalLauncher
from nmoe.engine.remote.process import ServerProcess
from nmoe.engine.remote.wire import GENERATE
from nmoe.errors import UserError
from nmoe.rollout.journal import read_journal
from nmoe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Kind:
    """A kind of fault. A run takes at most `most` of them, as the delays before a restart grow, with up to `gap` steps between
    two. `place` are its overrides, and `grading_s` the longest that a grade takes, in which an engine can start again."""

    most: int
    gap: int
    place: Sequence[str] = ("--placement.engines=2",)
    grading_s: float = 0.1


TRAINING = Kind(7, 4, ("--placement.engines=1",))
ENGINE = Kind(10, 2, grading_s=1.0)
KINDS: Mapping[str, Kind] = {
    "engine killed": ENGINE,
    "engine hung": ENGINE,
    "engine killed in a transfer": ENGINE,
    "training killed": TRAINING,
    "rank killed": Kind(7, 4, ("--placement.engines=1", "--placement.learner_gpus=2")),
    "parent killed": Kind(10, 3, ("--placement.engines=1",)),
    "disk full": TRAINING,
    "late and doubled answers": Kind(10, 0),
}
QUICK = ("training killed", "engine killed in a transfer")
HUNG_S, SLACK_S, LIMIT_S = 6.0, 10.0, 900.0
# A run whose parent is gone is asked to end, and killed after this time (`_GRACE_S` of nmoe/engine/remote/keeper.py).
GRACE_S = 10.0
PROMPTS, GROUP = 4, 4
CONFIG = f"""
[run]
directory = "."
threads = 1
[model]
path = "base"
numerics = "exact"
[environment]
path = "draw.toml"
[sampling]
max_new_tokens = 48
[batch]
prompts_per_step = {PROMPTS}
group_size = {GROUP}
[optimizer]
learning_rate = 1e-2
[checkpoint]
every_steps = 2
keep = 100
[monitor]
first_steps = "warn"
"""
SERVERS = """
[engine]
kind = "server"
args = ["--threads", "1"]
token_s = 0.2
"""
SHAPE = """
[run]
steps = 1
[sampling]
max_new_tokens = 48
[model]
tokenizer = "tokenizer"
[model.shape]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
experts = 4
experts_per_token = 2
expert_width = 32
context_tokens = 96
[environment]
path = "draw.toml"
"""
# Any text of a model drawn at random has some low ids.
REWARD = """
import asyncio, os, random

async def low(completion_ids, **columns):
    await asyncio.sleep(random.uniform(0, float(os.environ.get("FAULTS_GRADING_S", "0"))))
    return [sum(one < 100 for one in ids) / max(1, len(ids)) for ids in completion_ids]
"""
RESTARTED = ("--placement.restarts=100", f"--placement.hung_s={HUNG_S}", "--placement.wait_s=300")
# What depends on the engines that were there at the time.
OF_ENGINES = ("publish", "canary", "engine", "time_", "tokens_per_second", "mismatch_abs_mean/")


def make_workshop(workshop: Path) -> None:
    """Writes what the runs read: a model drawn at random, its tokenizer, an environment and the configurations."""
    workshop.mkdir(parents=True, exist_ok=True)
    files = {"placed.toml": CONFIG + SERVERS, "plain.toml": CONFIG, "drawn.toml": SHAPE, "draw.toml": ENVIRONMENT}
    for name, text in (files | {"low_ids.py": REWARD}).items():
        (workshop / name).write_text(text)
    if not (workshop / "base").exists():
        tokenizer = Tokenizer.train(["Reverse: analysis final back same"] * 10, 400)
        tokenizer.save(workshop / "tokenizer")
        draw = [sys.executable, "-m", "nmoe.cluster.base", "base", "drawn.toml"]
        subprocess.run(draw, cwd=workshop, env=environment(ROOT), check=True)
        tokenizer.save(workshop / "base")


class Run:
    """A run in `workshop`, with its parent's process."""

    def __init__(self, workshop: Path, name: str, config: str, *overrides: str) -> None:
        self.path, self._workshop, self._name = workshop / name, workshop, name
        self._command = [config, f"--run.name={name}", *overrides]
        for left in (self.path, self.said):  # by an earlier call with this workshop
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        self.start()

    @property
    def said(self) -> Path:
        return self._workshop / f"{self._name}.txt"

    def start(self, *more: str) -> None:
        command = [sys.executable, "-m", "nmoe.rl", "train", *self._command, *more]
        env = environment(ROOT) | {"FAULTS_RUN": str(self.path)}
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(command, cwd=self._workshop, env=env, stdout=said, stderr=said)

    def end(self) -> list[str]:
        """Waits for the end, and returns what is wrong with it. Kills what outlasts the limit."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return [f"the run ended with {code}: {self.said.read_text()[-500:]}"] if code else []

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def rows(self) -> list[dict[str, Any]]:
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []

    def steps(self) -> int:
        file = self.path / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait(self, holds: Callable[[], object]) -> float:
        """Waits until something holds or the run ends; returns the seconds."""
        began = time.monotonic()
        while not holds() and self.runs and time.monotonic() - began < LIMIT_S:
            time.sleep(0.01)
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

    def engines(self) -> list[str]:
        """Returns the states of the engines as the parent's log has them, from its first line on."""
        file = self.path / "engines/parent.log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition("engines: ")[2] for line in lines if "engines: " in line]

    def all_serve(self) -> bool:
        return "starting" not in (last := (self.engines() or ["starting"])[-1]) and "waiting" not in last


@dataclass
class Moment:
    """A fault: the step after which it came, the part of a step's seconds that it came later, and the seconds until it was noticed,
    until all processes ran again, and until the run went on with them."""

    step: int
    part: float
    noticed_s: float = 0.0
    started_s: float = 0.0
    went_on_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def strike(kind: str, run: Run, draw: random.Random, after: int) -> Moment | None:
    """Does what the fault is at a random moment after a step, and waits until the run has gone on. Returns None if it ended
    before."""
    run.wait(lambda: run.steps() > after and run.all_serve())
    moment = Moment(run.steps(), round(draw.random(), 3))
    # The first step takes longer.
    time.sleep(moment.part * min((row["time_step_s"] for row in run.rows()[-3:]), default=0.0))
    if kind == "engine killed in a transfer":
        before = {one.name for one in Path("/dev/shm").glob("nmoe_weights_*")}
        run.wait(lambda: {one.name for one in Path("/dev/shm").glob("nmoe_weights_*")} - before)
        time.sleep(draw.uniform(0, 0.02))
    role = "server" if kind.startswith("engine") else "train"
    there = run.processes(role)
    if not run.runs or not there:
        return None
    changes, struck = len(run.engines()), time.monotonic()

    def since() -> float:
        return round(time.monotonic() - struck, 1)

    if kind == "parent killed":
        run.process.kill()
        run.process.wait()
        while (still := run.processes("train") + run.processes("server")) and since() < GRACE_S + SLACK_S:
            time.sleep(0.1)
        moment.noticed_s = since()
        moment.wrong += [f"processes outlive their parent: {still}"] if still else []
        run.start("--run.resume=true")
    elif kind == "disk full":
        resource.prlimit(there[0], resource.RLIMIT_FSIZE, (draw.randrange(1000, 300_000),) * 2)
    else:
        os.kill(draw.choice(there), signal.SIGSTOP if kind == "engine hung" else signal.SIGKILL)
    if role == "train":
        if kind != "parent killed":
            run.wait(lambda: set(there).isdisjoint(run.processes("train")))
            moment.noticed_s = since()
        if kind == "disk full":
            run.wait(lambda: False)  # the run ends, as somebody has to make room
            if run.process.poll() != UserError.exit_code:
                return None
            run.start("--run.resume=true")
        run.wait(lambda: run.processes("train"))
        moment.started_s, steps = since(), run.steps()
        run.wait(lambda: run.steps() > steps)
        moment.went_on_s = since()
    else:
        run.wait(lambda: len(run.engines()) > changes)
        moment.noticed_s = since()
        run.wait(run.all_serve)
        moment.started_s, steps = since(), run.steps()
        run.wait(lambda: any(row["engines_serving"] == 2 for row in run.rows()[steps:]))
        moment.went_on_s = since()
        # The step that was going on ends, and the next one publishes.
        most = SLACK_S + 2 * max((row["time_step_s"] for row in run.rows()[-5:]), default=0.0)
        if run.runs and moment.went_on_s - moment.started_s > most:
            moment.wrong.append(f"started after {moment.started_s} s, it serves after {moment.went_on_s} s")
        if moment.noticed_s > SLACK_S + (HUNG_S if kind == "engine hung" else 0.0):
            moment.wrong.append(f"its loss was noticed after {moment.noticed_s} s")
    return moment


def left(run: Path) -> dict[str, Any]:
    """Returns what a run leaves that must not depend on faults."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def depends(name: str) -> bool:
        return is_timing(name) or name.startswith(OF_ENGINES)

    return {
        **{f"step {row['step']}": {k: v for k, v in row.items() if not depends(k)} for row in rows},
        **{
            f"{f.parent.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest()
            for f in sorted((run / "checkpoints").glob("step_*/*.safetensors"))
        },
    }


def differences(run: Path, whole: Path) -> list[str]:
    found, wanted = left(run), left(whole)
    return [f"{key} differs" for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)]


def faults_of_account(run: Path, steps: int) -> list[str]:
    """Returns what is wrong with the account of a run that samples beside its training."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [] if [row["step"] for row in rows] == [*range(1, steps + 1)] else ["steps are missing or doubled"]
    for row in rows:
        if row["tokens_sampled"] < row["tokens_trained"] + row["tokens_void"]:
            found.append(f"step {row['step']}: more tokens ended than were sampled")
    events = read_journal(run).events
    trained = [one for event in events if event["event"] == "train" for one in event["positions"]]
    void = [event["position"] for event in events if event["event"] == "end"]
    state = json.loads((run / "checkpoints/latest/state.json").read_text())["tickets"]
    there = Counter([*trained, *void, *state["outstanding"]])
    found += [f"position {one} is there {count} times" for one, count in there.items() if count > 1]
    found += [f"position {one} is lost" for one in range(state["next"]) if one not in there]
    if (len(trained), len(void)) != (state["trained"], sum(state["void"].values())):
        found.append(f"the journal has {len(trained)} groups trained and {len(void)} void, the account {state}")
    if len(trained) != steps * PROMPTS:
        found.append(f"{len(trained)} groups were trained on in {steps} steps")
    seen: dict[str, int] = {}
    for step, row in enumerate(rows, start=1):
        lines = (run / "samples" / f"step_{step:06}.jsonl").read_text().splitlines()
        for problem in {json.loads(line)["problem"] for line in lines}:
            if seen.setdefault(problem, row["step"]) != row["step"]:
                found.append(f"{problem} is in steps {seen[problem]} and {row['step']}")
    return found


def answers(workshop: Path, name: str, overrides: Sequence[str], draw: random.Random, most: int) -> tuple[Run, int]:
    """Runs over two servers behind proxies, whose answers come late and twice at random; returns how many of them did."""
    done = 0

    def fault(path: str, number: int) -> Any:
        nonlocal done
        if path != GENERATE or done == most or draw.random() > 0.05:
            return None
        done += 1
        return draw.choice(("late", "twice"))

    logs = LocalLauncher(workshop / f"{name}_servers")
    options = ("--port", "{port}", "--numerics", "exact", "--precision", "float32", "--device", "cpu", "--threads", "1")
    command = [sys.executable, "-m", "nmoe.engine.server", str((workshop / "base").resolve()), *options]
    proxies = [FaultyProxy(ServerProcess(f"server_{n}", command, {}, logs), fault, 1.0) for n in range(2)]
    try:
        urls = json.dumps([proxy.start() for proxy in proxies])
        run = Run(workshop, name, "placed.toml", f"--engine.urls={urls}", "--engine.wait_s=60", *overrides)
        run.wait(lambda: False)
        return run, done
    finally:
        for proxy in proxies:
            proxy.stop()


def disturbed(kind: str, number: int, workshop: Path, steps: int, moments: int, seed: int) -> dict[str, Any]:
    """Makes a run with up to so many faults of a kind, and returns what came of it."""
    draw, beside, how = random.Random(f"{seed} {kind} {number}"), number % 2 == 1, KINDS[kind]
    name, moments = f"{kind.replace(' ', '_')}_{number}", min(moments, how.most)
    overrides = [f"--run.steps={steps}", *(["--async.max_staleness=1"] if beside else [])]
    os.environ["FAULTS_GRADING_S"] = str(how.grading_s)
    began, cpu = time.monotonic(), cpu_s()
    met: list[Moment] = []
    if kind == "late and doubled answers":
        run, done = answers(workshop, name, overrides, draw, moments)
        met += [Moment(0, 0.0) for _ in range(done)]
    else:
        run = Run(workshop, name, "placed.toml", *how.place, *RESTARTED, *overrides)
        while len(met) < moments and run.runs:
            moment = strike(kind, run, draw, run.steps() - 1 + draw.randint(1, how.gap))
            met += [] if moment is None else [moment]
    wrong = run.end()
    if not wrong:
        ranks = "_ranks" if kind == "rank killed" else ""
        wrong = faults_of_account(run.path, steps) if beside else differences(run.path, workshop / f"whole{ranks}")
    return {
        "kind": kind,
        "run": number,
        "beside": beside,
        "took_s": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu_s() - cpu, 1),
        "wrong": wrong,
        "moments": [asdict(moment) for moment in met],
    }


def cpu_s() -> float:
    """Returns the CPU seconds of processes that have ended and were waited for, and of those that these waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def quick(workshop: Path) -> list[str]:
    """Disturbs one run beside its training by a fault of each kind of QUICK, and executes it again; returns what is wrong."""
    steps, draw = 10, random.Random(0)
    os.environ["FAULTS_GRADING_S"] = "1"
    place = ("--placement.engines=2", *RESTARTED, f"--run.steps={steps}", "--async.max_staleness=4")
    run = Run(workshop, "quick", "placed.toml", *place)
    met = []
    for kind in QUICK:
        met.append(strike(kind, run, draw, run.steps() + 1))
        print(json.dumps({"kind": kind} | (asdict(met[-1]) if met[-1] else {})), flush=True)
    wrong = run.end() or faults_of_account(run.path, steps)
    wrong += [f"the run ended before its {kind}" for kind, one in zip(QUICK, met, strict=True) if one is None]
    wrong += [one for moment in met if moment is not None for one in moment.wrong]
    for row in run.rows():
        if any(row.get(name, 0.0) > 0.0 for name in ("mismatch_abs_max", "canary_abs_max")):
            wrong.append(f"step {row['step']}: engines and learner differ")
    # How many depends on the machine: a fast one has sampled all before a publication comes. .ci/replayed.py asks for some.
    print(f"{versions(run.path)} samples of several versions of the weights", flush=True)
    command = [sys.executable, "-m", "nmoe", "replay", "quick", "--train", "--allow-user-code"]
    replay = subprocess.run(command, cwd=workshop, env=environment(ROOT), capture_output=True, text=True)
    print(replay.stdout, flush=True)
    if replay.returncode or replay.stdout.count(": the same\n") < steps // 2:
        wrong.append(f"it is not the same when executed again: {replay.stderr[-500:]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--moments", type=int, default=20, help="of each kind")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--workshop", type=Path, help="a directory to keep the runs in")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        workshop = arguments.workshop or Path(directory)
        make_workshop(workshop)
        if arguments.quick:
            wrong = quick(workshop)
            print(*wrong, sep="\n")
            return int(bool(wrong))
        return whole(arguments, workshop)


def whole(arguments: argparse.Namespace, workshop: Path) -> int:
    """Tries moments of all kinds that are asked for."""
    kinds = (arguments.only,) if arguments.only else tuple(KINDS)
    record: dict[str, Any] = {"seed": arguments.seed, "steps": arguments.steps, "runs": []}
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        if (kept["seed"], kept["steps"]) != (arguments.seed, arguments.steps):
            raise SystemExit(
                f"{arguments.json}: it has runs of seed {kept['seed']} and {kept['steps']} steps; move it away"
            )
        record["runs"] = kept["runs"]
    undisturbed = {"whole": ("plain.toml",), "whole_ranks": ("placed.toml", *KINDS["rank killed"].place, *RESTARTED)}
    for kind in kinds:
        name = "whole_ranks" if kind == "rank killed" else "whole"
        while (missing := arguments.moments - sum(tried(record, kind).values())) > 0:
            there = (workshop / name / "checkpoints" / f"step_{arguments.steps:06}").exists()
            if not there and (wrong := Run(workshop, name, *undisturbed[name], f"--run.steps={arguments.steps}").end()):
                raise SystemExit(wrong[0])
            number = sum(run["kind"] == kind for run in record["runs"])
            done = disturbed(kind, number, workshop, arguments.steps, missing, arguments.seed)
            print(json.dumps(done), flush=True)
            record["runs"].append(done)
            record |= {"date": time.strftime("%Y-%m-%d"), **machine()}
            record["moments"] = {one: dict(tried(record, one)) for one in KINDS}
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(record, indent=1) + "\n")
            if not done["moments"]:
                raise SystemExit(f"{kind}: a run ended before its first fault")
    for kind in kinds:
        print(f"{kind}: {tried(record, kind)['right']} of {sum(tried(record, kind).values())} moments right")
    return int(any(tried(record, kind)["wrong"] for kind in kinds))


def tried(record: Mapping[str, Any], kind: str) -> Counter[str]:
    """Counts the moments of a kind: "right", and "wrong" where something is wrong with them or with their run."""
    found: Counter[str] = Counter(right=0, wrong=0)
    for run in record["runs"]:
        for moment in run["moments"] if run["kind"] == kind else ():
            found["wrong" if run["wrong"] or moment["wrong"] else "right"] += 1
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
