"""Plays environments of OpenEnv and of the Open Reward Standard, on servers of their own packages, as `.ci/long trainers` does.

    .venv-mcp/bin/python .ci/openenv_ors.py .venv-openenv/bin/python --json benchmarks/results/openenv_ors.json

The second interpreter has openenv 0.10.0 and ors-sdk 0.1.0. The policy is a script; prompts, rewards, failures and replays are
checked. The figures are CPU milliseconds of this process for an episode of three turns (`benchmarks/live_episodes.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import httpx2
from live_episodes import Alone, milliseconds, pool_of
from machine import machine, versions
from scripted_engine import ScriptedEngine

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.registry import hand_over
from nmoe.config.tables.pools import PythonPool
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import Collector
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import replay
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Sampling

OPENENV = """
import os, sys
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    said: str


class Countdown(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, start=None, **_):
        self.left, self.steps = start or 2 + seed % 3, 0
        return Heard(said=f"Count down from {self.left}.")

    def step(self, action, timeout_s=None, **_):
        self.left, self.steps = self.left - 1, self.steps + 1
        if action.message == "nan":
            return Heard(said="on", reward=float("nan"))
        if action.message == "raise":
            raise ValueError("no such number")
        if action.message == "die":
            os._exit(3)
        right = action.message in (str(self.left), "said")
        over = not right or self.left == 0
        return Heard(said="on", reward=float(right and over), done=over)

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    import uvicorn

    app = create_fastapi_app(Countdown, Say, Heard, max_concurrent_envs=256)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""
ORS = """
import os, sys
from ors import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel


class Said(BaseModel):
    number: str


class Countdown(Environment):
    @classmethod
    def list_splits(cls):
        return [Split(name="train", type="train")]

    @classmethod
    def list_tasks(cls, split):
        return [{"start": start} for start in range(2, 8)]

    def setup(self):
        self.left = self.task_spec["start"]

    def get_prompt(self):
        return [TextBlock(text=f"Count down from {self.left}.")]

    @tool
    def say(self, said: Said) -> ToolOutput:
        self.left -= 1
        if said.number == "nan":
            return ToolOutput(blocks=[TextBlock(text="on")], reward=float("nan"))
        if said.number == "raise":
            raise ValueError("no such number")
        if said.number == "die":
            os._exit(3)
        right = said.number in (str(self.left), "said")
        over = not right or self.left == 0
        return ToolOutput(blocks=[TextBlock(text="on")], reward=float(right and over), finished=over)


if __name__ == "__main__":
    Server([Countdown]).run(host="127.0.0.1", port=int(sys.argv[1]))
"""
PORTS = {"openenv": 8793, "ors": 8794}
RECORDS: dict[str, dict[str, Any]] = {
    "openenv": {
        "url": f"http://127.0.0.1:{PORTS['openenv']}",
        "action": "message",
        "shows": "said",
        "reset": {"start": 3},
    },
    "ors": {
        "url": f"http://127.0.0.1:{PORTS['ors']}",
        "env": "countdown",
        "split": "train",
        "index": 1,
        "tool": "say",
        "field": "number",
    },
}


@contextmanager
def served(python: str, task: str) -> Iterator[None]:
    """Serves the environment until the block ends."""
    file = Path(f"{task}_server.py")
    file.write_text(OPENENV if task == "openenv" else ORS)
    command = [python, str(file), str(PORTS[task])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                httpx2.get(f"http://127.0.0.1:{PORTS[task]}/health")
                break
            except httpx2.HTTPError:
                assert process.poll() is None, f"{task}: its server ended"
                assert time.monotonic() < deadline, f"{task}: its server did not start"
                time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


class Played:
    """An environment that the policy says the same turns in."""

    def __init__(self, task: str) -> None:
        self.tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY)
        pool = PythonPool(type="python", task_type=task, call=hand_over([RECORDS[task]])[0])
        settings = EnvironmentSettings(env_id=task, format="boxed", task_pool=pool)
        self.environment = Environment.from_settings(settings, self.tokenizer)

    def play(self, *turns: str, samples: int = 1) -> list[Trajectory]:
        ids = [[*self.tokenizer.encode(turn), *self.environment.renderer.stop_ids] for turn in turns]

        def script(request: Request, index: int) -> list[int]:
            first = request.samples > 1 or request.request_id.startswith("(")
            return ids[0 if first else int(request.request_id.rpartition("/")[2])]

        collector = Collector(ScriptedEngine(script), self.environment, 4000)  # type: ignore[arg-type]
        (group,) = collector.collect(self.environment.pool.take(1), samples, Sampling(400), (7, "train")).groups
        return list(group.trajectories)

    def replayed(self, trajectory: Trajectory) -> None:
        directory = Path(f"replay_{self.environment.settings.env_id}")
        directory.mkdir(exist_ok=True)
        recorder = ReplayRecorder(directory, self.environment, self.tokenizer, seed=0, sample_rate=1.0, per_failure=0)
        (path,) = recorder.write(1, [trajectory])

        async def checks() -> list[str]:
            return [str(one) async for one in replay(read_bundle(path), self.tokenizer) if one.difference is not None]

        assert (differing := asyncio.run(checks())) == [], differing


def stopped(part: str, played: Played, turn: str) -> None:
    """Checks that a turn stops the run with an error that has this part."""
    try:
        played.play(turn)
    except UserError as error:
        said = str(error)
    else:
        raise SystemExit(f"{turn}: nothing was raised")
    assert part in said, said


def proven(python: str, task: str) -> float:
    """Checks one of the two; returns the CPU milliseconds of an episode."""
    with served(python, task):
        played = Played(task)
        many = played.play("2", "1", "0", samples=64)
        for one in many:
            assert one.problem.question == "Count down from 3.", one.problem.question
            assert [(each.user, each.reward) for each in one.exchanges] == [("on", 0.0), ("on", 0.0), (None, 1.0)]
            assert one.grade.components["correctness"] == 1.0
        (wrong,) = played.play("2", "3")
        assert [each.reward for each in wrong.exchanges] == [0.0, 0.0]
        stopped("not a number", played, "nan")
        stopped("no such number", played, "raise")
        records = [RECORDS[task]] * 4
        taken = milliseconds(PythonPool(type="python", task_type=task, call=hand_over(records)[0]))
        (lost,) = played.play("die")
        assert (lost.grade.failure, lost.trainable) == ("environment_error", False), lost.grade
    for one in (many[0], wrong, lost):
        played.replayed(one)
    print(
        f"{task}: 64 episodes at once, rewards, NaN, an exception, a lost server ({lost.grade.reason}), replays without it"
    )
    return taken


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("python")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    python, out = str(Path(given.python).absolute()), None if given.json is None else given.json.resolve()
    root = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        figures = {"alone": milliseconds(pool_of(hand_over(Alone)[0]))}
        figures |= {task: proven(python, task) for task in PORTS}
        os.chdir(root)
    beside = {name: round(value - figures["alone"], 2) for name, value in figures.items()}
    for name, value in figures.items():
        print(f"{name:<8} {value:6.2f} ms of CPU for an episode of three turns, {beside[name]:+.2f} ms")
    if out is not None:
        out.write_text(
            json.dumps({"milliseconds": figures, "machine": machine(), "versions": versions()}, indent=1) + "\n"
        )
    assert max(beside.values()) <= 20, f"more than 20 ms: {beside}"


if __name__ == "__main__":
    main()
