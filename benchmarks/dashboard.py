"""Measures the dashboard: CPU time and memory of its server on a long run, and the cost of recording and of explaining tokens.

    python benchmarks/dashboard.py server
    python benchmarks/dashboard.py recording runs/speedrun/base --steps 20
    python benchmarks/dashboard.py explain runs/exact --tokens 1000

CPU seconds are the server's own, from /proc; other programs on the machine do not count. `server` makes a run of 10,000 steps with
100,000 samples, looks at it as the page does, and has strace list the files of the run that the server opens. `recording` trains
the speedrun with `[monitor] samples = "all"` and times the parts that record. `explain` derives random tokens of a run with exact
numerics and kept weights. Each part writes its figures to benchmarks/results/dashboard.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from machine import machine
from result_files import write_results

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from made_runs import TEXTS, Made, Writer

from nmoe.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results" / "dashboard.json"
CURVES = "reward_mean,correctness,loss,response_length_mean,entropy_mean,grad_norm,ppo_kl,mismatch_abs_mean"
FILTERS: dict[str, dict[str, str]] = {
    "newest": {},
    "reward and step": {"reward_min": "0.5", "step_min": "3000", "step_max": "6000"},
    "highest reward": {"order": "reward"},
    "problem": {"problem": "sums/123"},
    "wrong and rewarded": {"wrong": "1"},
    "longest": {"order": "tokens", "failure": "ok"},
}
FOLLOWED_S = 60


class Watched:
    """A process of `nmoe dashboard`."""

    def __init__(self, process: subprocess.Popen[str], url: str, pid: int) -> None:
        self.process, self.url, self.pid = process, url, pid

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, in nanoseconds' resolution."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024

    def ask(self, name: str, **params: Any) -> Any:
        with urllib.request.urlopen(f"{self.url}data/{name}?{urlencode(params)}") as reply:
            return json.load(reply)


@contextmanager
def watched(directory: Path, cache: Path, *before: str) -> Iterator[Watched]:
    command = [*before, sys.executable, "-m", "nmoe", "dashboard", str(directory), "--port", "0"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "NMOE_DASHBOARD_KEY": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    url = process.stdout.readline().rpartition(" ")[2].strip()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pid = int(children[0]) if before else process.pid
    try:
        yield Watched(process, url, pid)
    finally:
        os.kill(pid, signal.SIGTERM)
        process.wait(30)


def first_view(server: Watched) -> float:
    """CPU seconds of everything that the page asks for when a run's curves are opened."""
    began = server.cpu_s()
    for name in ("", "page/js/main.js", "page/css/base.css", "page/vendored/uPlot.iife.min.js"):
        urllib.request.urlopen(server.url + name).read()
    server.ask("runs")
    server.ask("run", run="long")
    server.ask("curves", runs="long", names=CURVES, points=800)
    return server.cpu_s() - began


def spent(server: Watched, name: str, **params: Any) -> tuple[float, Any]:
    """The least CPU seconds of three answers to the same question, and the answer."""
    found, reply = [], None
    for _ in range(3):
        began = server.cpu_s()
        reply = server.ask(name, run="long", **params)
        found.append(server.cpu_s() - began)
    return min(found), reply


def of_server(steps: int) -> dict[str, Any]:
    tokenizer = Tokenizer.train(TEXTS, 320)
    with tempfile.TemporaryDirectory() as scratch:
        runs, cache = Path(scratch) / "runs", Path(scratch) / "cache"
        runs.mkdir()
        writer = Writer(runs, Made("long", steps, 2, 5, 1000, 64, hacked_from=steps // 2, unsolved=30), tokenizer)
        for step in range(1, steps + 1):
            writer.step(step)
        result: dict[str, Any] = {"steps": steps, "samples": 10 * steps}
        with watched(runs, cache) as server:
            result["start_cpu_s"] = server.cpu_s()
            result["first_view_cpu_s"] = first_view(server)
            began = server.cpu_s()
            while server.ask("samples", run="long")["indexing"]:
                time.sleep(2)
            result["index_cpu_s"] = server.cpu_s() - began
            result["filters_cpu_ms"] = {
                name: round(1000 * spent(server, "samples", **params)[0], 1) for name, params in FILTERS.items()
            }
            for name, text in (("common", "the answer is 42"), ("rare", "no such words")):
                took, reply = spent(server, "samples", text=text)
                result[f"search_{name}_cpu_ms"] = round(1000 * took, 1)
                result[f"search_{name}_rows"] = len(reply["rows"])
            result["sample_cpu_ms"] = round(1000 * spent(server, "sample", step=steps, line=0)[0], 1)
            result["tokens_cpu_ms"] = round(1000 * spent(server, "tokens", step=steps, line=0)[0], 1)
            result["peak_mb"] = round(server.peak_mb(), 1)
        with watched(runs, cache) as server:
            result["first_view_with_index_cpu_s"] = first_view(server)
            cursor = server.ask("curves", runs="long", names=CURVES)["runs"]["long"]["cursor"]
            began, until = server.cpu_s(), time.monotonic() + FOLLOWED_S
            while time.monotonic() < until:
                steps += 1
                writer.step(steps)
                time.sleep(3)
                reply = server.ask("curves", runs="long", names=CURVES, since=cursor)["runs"]["long"]
                cursor = reply["cursor"]
            result["following_share_of_a_core"] = (server.cpu_s() - began) / FOLLOWED_S
        result["opened_to_write"] = opened_to_write(runs, cache, Path(scratch) / "strace")
    return result


def opened_to_write(runs: Path, cache: Path, log: Path) -> list[str]:
    """The lines of strace for files below `runs` that were opened other than to read."""
    trace = "trace=openat,open,creat,unlink,unlinkat,rename,renameat,renameat2,mkdir,mkdirat,truncate,ftruncate"
    with watched(runs, cache, "strace", "-f", "-o", str(log), "-e", trace) as server:
        first_view(server)
        server.ask("samples", run="long", text="the answer")
        server.ask("sample", run="long", step=1, line=0)
        server.ask("tokens", run="long", step=1, line=0)
        server.ask("load", run="long", layer=0)
        server.ask("problems", run="long")
    lines = [line for line in log.read_text().splitlines() if str(runs) in line]
    assert len(lines) > 20, "the server read the run"
    return [line for line in lines if "O_RDONLY" not in line]


def of_recording(base: str, steps: int) -> dict[str, Any]:
    from nmoe.config.commands import RLConfig
    from nmoe.config.loader import load_run_with
    from nmoe.rl.launch import train
    from nmoe.rl.train import PolicyGradient
    from nmoe.rl.update import PolicyUpdate

    seconds: dict[str, float] = defaultdict(float)

    def timed(owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(*arguments)
            finally:
                seconds[method.strip("_")] += time.thread_time() - began

        setattr(owner, method, call)

    timed(PolicyGradient, "_record_samples")
    timed(PolicyUpdate, "token_columns")
    with tempfile.TemporaryDirectory() as directory:
        own = {
            "run": {"directory": directory, "steps": steps},
            "model": {"path": base},
            "monitor": {"samples": "all"},
            "eval": [],
        }
        config = load_run_with(Path("speedrun"), RLConfig, own, "benchmark", "rl")
        began = time.process_time()
        run = train(config)
        whole = time.process_time() - began
        size = sum(file.stat().st_size for file in (run / "samples").iterdir())
        samples = sum(len(file.read_text().splitlines()) for file in (run / "samples").glob("*.jsonl"))
    return {
        "steps": steps,
        "cpu_s": whole,
        "parts_cpu_s": dict(seconds),
        "share": sum(seconds.values()) / whole,
        "samples": samples,
        "mb": size / 1e6,
    }


def of_explaining(run: Path, tokens: int) -> dict[str, Any]:
    from nmoe.rl.explain import Explainer
    from nmoe.runs.ledger import read_lines

    draw, found = random.Random(0), []
    for file in sorted((run / "samples").glob("*.jsonl")):
        records = read_lines(file)
        found += [
            (record["step"], line, token)
            for line, record in enumerate(records)
            if record["left_out"] is None
            for token in range(len(record["token_ids"]))
        ]
    began = time.process_time()
    explainer = Explainer(run)
    loaded = time.process_time() - began
    differing = numbers = 0
    longest = 0.0
    # By step, as somebody who looks at one step after the other: the batch of a step is derived once.
    for place in sorted(draw.sample(found, min(tokens, len(found)))):
        start = time.process_time()
        findings = explainer.explain(*place)
        longest = max(longest, time.process_time() - start)
        differing += any(one.recorded is not None for one in findings)
        numbers += sum(not one.why_not for one in findings)
    whole = time.process_time() - began
    return {
        "tokens": min(tokens, len(found)),
        "numbers": numbers,
        "tokens_that_differ": differing,
        "load_cpu_s": loaded,
        "mean_cpu_s": whole / min(tokens, len(found)),
        "longest_cpu_s": longest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("server").add_argument("--steps", type=int, default=10_000)
    recording = parts.add_parser("recording")
    recording.add_argument("base", help="the speedrun's base")
    recording.add_argument("--steps", type=int, default=20)
    explaining = parts.add_parser("explain")
    explaining.add_argument(
        "run", type=Path, help="a run with exact numerics, all samples, and the weights of every step"
    )
    explaining.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    if options.part == "server":
        if shutil.which("strace") is None:
            sys.exit("needs strace: apt-get install strace")
        found = of_server(options.steps)
    elif options.part == "recording":
        found = of_recording(options.base, options.steps)
    else:
        found = of_explaining(options.run, options.tokens)
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result = {**before, options.part: found | {"date": time.strftime("%Y-%m-%d")}, "machine": machine()}
    write_results(RESULTS, result)
    print(json.dumps(result[options.part], indent=1))


if __name__ == "__main__":
    main()
