"""Plays episodes whose tools are a server of the package mcp, over pipes and over HTTP, as `.ci/long trainers` does.

    .venv-mcp/bin/python .ci/mcp_servers.py --json benchmarks/results/mcp_servers.json

The policy is a script: what is checked are the replies, the records and the failures. The figures are CPU milliseconds of this
process for an episode of three calls, beside the same calls of a function of this process, which does nothing either.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from machine import machine, versions
from scripted_engine import ScriptedEngine

from nmoe.config.loader import load_environment
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import Collector
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import replay
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Message, Problem, Sampling

ROOT = Path(__file__).resolve().parents[1]
SERVER = '''
import anyio, os, sys, time
from pathlib import Path
from mcp.server.mcpserver import MCPServer

kept = []
server = MCPServer("notes")


@server.tool(description=Path("described").read_text())
def add(x: int, y: int = 2) -> int:
    return x + y


@server.tool()
def keep(text: str) -> str:
    """Keeps a text, and returns all that were kept."""
    kept.append(text)
    return " ".join(kept)


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no such word")


@server.tool()
def crash() -> str:
    """Ends the server."""
    print("out of words", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Hangs, and the whole server with it."""
    time.sleep(600)


@server.tool()
async def wait() -> str:
    """Takes long, while the server answers other calls."""
    await anyio.sleep(600)


@server.tool()
def variables() -> str:
    """Names the environment."""
    return " ".join(sorted(os.environ))


class Guarded:
    def __init__(self, application):
        self.application = application

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != b"Bearer secret":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no key"})
        else:
            await self.application(scope, receive, send)


if len(sys.argv) > 1:
    import uvicorn

    uvicorn.run(Guarded(server.streamable_http_app()), port=int(sys.argv[1]), log_level="warning", log_config=None)
else:
    server.run("stdio")
'''
ENVIRONMENT = """
env_id = "notes"
task = "sort"
[tools]
{use}
{server}
[budget]
tool_s = {tool_s}
"""
OVER_PIPES = (
    '[[tools.servers]]\nname = "notes"\ncommand = ["{python}", "server.py"]\nscope = "{scope}"\nenv = ["NOTES_KEY"]\n'
)
OVER_HTTP = '[[tools.servers]]\nname = "notes"\nurl = "http://127.0.0.1:{port}/mcp"\nscope = "{scope}"\ntoken_env = "NOTES_KEY"\n'
OWN = "async def add(x: int, y: int = 2) -> int:\n    'Adds.'\n    return x + y\n"
PROBLEM = Problem("notes/0", "sort", "Sort: 312", "123", "notes")
COMMANDS = (["no-such-program"], [sys.executable, "-c", "raise SystemExit('no display')"])
PORT = 8791
EPISODES, ROUNDS = 16, 3


class Notes:
    """The environment with its policy, which makes the calls that it is told to make."""

    def __init__(self, tables: str, use: str = "", tool_s: float = 20.0) -> None:
        Path("environment.toml").write_text(ENVIRONMENT.format(use=use, server=tables, tool_s=tool_s))
        self.tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY)
        self.environment = Environment.from_settings(load_environment(Path("environment.toml")), self.tokenizer)

    def play(self, calls: list[tuple[str, str]], samples: int = 1) -> list[Trajectory]:
        said = [
            Message("assistant", text, "commentary", f"functions.{name}", content_type="json") for name, text in calls
        ]
        harmony = Harmony(self.tokenizer)
        turns = [harmony.render_completion([one]) for one in [*said, Message("assistant", "123", "final")]]

        def script(request: Any, index: int) -> list[int]:
            first = request.request_id.count("/") < 4
            return turns[0 if first else int(request.request_id.split("/")[-1])]

        collector = Collector(ScriptedEngine(script), self.environment, 20_000)  # type: ignore[arg-type]
        (group,) = collector.collect([PROBLEM], samples, Sampling(4000), (1, "train", 1)).groups
        return list(group.trajectories)

    def outputs(self, *calls: tuple[str, str]) -> list[tuple[str, str]]:
        (trajectory,) = self.play([*calls])
        return [(event.failure, event.output) for event in trajectory.tool_events]


@contextmanager
def over_http() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "server.py", str(PORT)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                Notes(OVER_HTTP.format(port=PORT, scope="run"))
                break
            except UserError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield process
    finally:
        process.kill()
        process.wait()


def milliseconds(notes: Notes) -> float:
    """Returns the CPU time of this process for an episode of three calls."""
    calls = [("add", '{"x": 1}')] * 3
    taken = []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        found = notes.play(calls, EPISODES)
        taken.append((time.process_time() - began) * 1000 / EPISODES)
        assert [event.output for one in found for event in one.tool_events] == ["3"] * 3 * EPISODES
    return statistics.median(taken[1:])


def replayed(notes: Notes, trajectory: Trajectory) -> None:
    recorder = ReplayRecorder(
        Path("replay"), notes.environment, notes.tokenizer, seed=0, sample_rate=1.0, per_failure=0
    )
    (path,) = recorder.write(1, [trajectory])
    text = (
        path.read_bytes() if path.is_file() else b"".join(one.read_bytes() for one in path.rglob("*") if one.is_file())
    )
    assert b"secret" not in text, "a key stands in a record"

    async def checks() -> list[str]:
        return [
            str(check) async for check in replay(read_bundle(path), notes.tokenizer) if check.difference is not None
        ]

    assert (differing := asyncio.run(checks())) == [], differing


def replies(notes: Notes, where: str) -> Trajectory:
    """Checks replies and failures; returns a trajectory."""
    (right,) = notes.play([("add", '{"x": 40}'), ("add", '{"x": "a"}'), ("keep", '{"text": "a"}'), ("fail", "{}")])
    found = [(event.failure, event.output) for event in right.tool_events]
    assert found[0] == ("ok", "42"), found
    assert found[1][0] == "parse_error", found
    assert found[2] == ("ok", "a"), found
    assert found[3][0] == "tool_error", found
    assert "Error executing tool fail" in found[3][1], found
    assert right.grade.components["correctness"] == 1.0
    print(f"{where}: replies, arguments that do not fit and the tool's own error reach the policy")
    return right


def refused(what: str, part: str, function: Callable[[], Any]) -> None:
    """Checks that a call raises a UserError with this part."""
    try:
        function()
    except UserError as error:
        said = str(error)
    else:
        raise SystemExit(f"{what}: nothing was raised")
    assert part in said, said
    print(f"{what}: {said}")


def with_key(key: str, function: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        os.environ["NOTES_KEY"] = key
        try:
            return function()
        finally:
            os.environ["NOTES_KEY"] = "secret"

    return call


def proven() -> dict[str, float]:
    described = Path("described")
    described.write_text("Adds.")
    Path("server.py").write_text(SERVER)
    Path("own_tools.py").write_text(OWN)
    Path("replay").mkdir()
    os.environ |= {"NOTES_KEY": "secret", "NMOE_ENGINE_KEY": "secret"}
    python = sys.executable
    pipes = {scope: OVER_PIPES.format(python=python, scope=scope) for scope in ("episode", "run")}
    http = {scope: OVER_HTTP.format(port=PORT, scope=scope) for scope in ("episode", "run")}
    refused("without its key", "NOTES_KEY", with_key("", lambda: Notes(pipes["run"])))
    absent, broken = (f'[[tools.servers]]\nname = "notes"\ncommand = {json.dumps(one)}\n' for one in COMMANDS)
    refused("no program", "no-such-program", lambda: Notes(absent))
    refused("a program that ends", "no display", lambda: Notes(broken))

    notes = Notes(pipes["episode"])
    right = replies(notes, "over pipes")
    (_, seen), *_ = notes.outputs(("variables", "{}"))
    assert "NOTES_KEY" in seen.split(), seen
    assert not any(name.startswith("NMOE") for name in seen.split()), seen
    assert notes.outputs(("keep", '{"text": "b"}')) == [("ok", "b")], "each episode has a server of its own"
    (crashed,) = notes.play([("crash", "{}")])
    assert (crashed.grade.failure, crashed.trainable) == ("environment_error", False)
    assert "out of words" not in str(crashed.tool_events), "what a program writes is shown on stderr alone"
    assert notes.outputs(("add", '{"x": 1}')) == [("ok", "3")], "the server is started again"
    (hung,) = Notes(pipes["run"], tool_s=3.0).play([("hang", "{}")])
    assert (hung.grade.failure, hung.trainable) == ("environment_error", False)
    (slow,) = Notes(pipes["run"], tool_s=3.0).play([("wait", "{}")])
    assert (slow.tool_events[0].failure, slow.trainable) == ("timeout", True), (
        "a long call of a server that lives is the policy's"
    )
    print(f"over pipes: masked, and started again: {crashed.tool_events[0].reason}; {hung.tool_events[0].reason}")

    figures = {"function": milliseconds(Notes("", 'use = ["own_tools:add"]'))}
    figures["pipes, a process for each episode"] = milliseconds(notes)
    figures["pipes, one process"] = milliseconds(Notes(pipes["run"]))
    with over_http() as process:
        refused("a wrong key", "401", with_key("wrong", lambda: Notes(http["run"])))
        shared = Notes(http["run"])
        replies(shared, "over HTTP")
        figures["HTTP, a session for each episode"] = milliseconds(Notes(http["episode"]))
        figures["HTTP, one session"] = milliseconds(shared)
        process.kill()
        process.wait()
        (lost,) = shared.play([("add", '{"x": 1}')])
        assert (lost.grade.failure, lost.trainable) == ("environment_error", False), lost.grade
    with over_http():
        assert shared.outputs(("add", '{"x": 1}')) == [("ok", "3")], "it is asked again when it is back"
        print(f"over HTTP: masked while the server is away: {lost.tool_events[0].reason}")
    replayed(notes, right)
    replayed(notes, crashed)
    replayed(shared, lost)
    print("replayed without a server")
    again = Notes(pipes["episode"])
    described.write_text("Multiplies.")
    was = "'add' is described as 'Multiplies.', and was as 'Adds.'"
    refused("other tools in a run", was, lambda: again.outputs(("add", '{"x": 1}')))
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", type=Path)
    out = arguments.parse_args().json
    out = None if out is None else out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        figures = {name: round(value, 2) for name, value in proven().items()}
        os.chdir(ROOT)
    for name, value in figures.items():
        print(f"{name:<34} {value:7.2f} ms of CPU for an episode of three calls, {value - figures['function']:+.2f} ms")
    if out is not None:
        record = {"milliseconds": figures, "machine": machine(), "versions": versions()}
        out.write_text(json.dumps(record, indent=1) + "\n")
    over = {
        name: value for name, value in figures.items() if name.startswith("HTTP") and value - figures["function"] > 20
    }
    assert not over, f"more than 20 ms over HTTP: {over}"


if __name__ == "__main__":
    main()
