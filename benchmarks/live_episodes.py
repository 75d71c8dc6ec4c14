"""Measures the CPU time that our process needs for an episode of a foreign environment which does nothing.

    python benchmarks/live_episodes.py          half a minute on a core; with the package skyrl-gym also its environments

Each episode has three turns in plain text, on an engine that answers at once. The first side is a `MultiTurnEnv`, which is a
function of its state; the others are a `LiveEpisode`, an environment of skyrl-gym and one in another process, which asks by HTTP as
environments of verifiers do. All say "on" twice. The other process is not counted. Figures are medians of rounds of 64 episodes, in
milliseconds for an episode. The last line printed is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from machine import machine, versions

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from outside_venv import venv

import nmoe
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.registry import hand_over
from nmoe.config.tables.pools import PythonPool, TaskPool, VerifiersPool
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tasks.own import MultiTurnEnv
from nmoe.rollout.collector import Collector
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from nmoe.types import Sample, Sampling

R = TypeVar("R")
TURNS, GROUPS, SAMPLES, ROUNDS = 3, 4, 16, 12


class InstantEngine:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return asyncio.run(coroutine)

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        for index in range(request.samples):
            yield index, Sample([*self._ids], [-0.5] * len(self._ids), [0] * len(self._ids), "stop")

    async def generate(self, request: Request) -> list[Sample]:
        return [sample async for _, sample in self.samples(request)]


class Alone(MultiTurnEnv):
    def prompt(self) -> str:
        self.turns = 0
        return str(self.record["prompt"][0]["content"])

    def step(self, turn: Any) -> Any:
        self.turns += 1
        return "on", 0.0, self.turns == TURNS


class Live(nmoe.LiveEpisode):
    async def open(self, record: Any, seed: int) -> Any:
        self.turns = 0
        return record["prompt"]

    async def step(self, turn: Any) -> Any:
        self.turns += 1
        return "on", 0.0, self.turns == TURNS


def register_gym() -> bool:
    """Registers an environment with skyrl-gym that does nothing. Returns whether the package is installed."""
    try:
        import skyrl_gym
        from skyrl_gym.envs.base_text_env import BaseTextEnv
    except ModuleNotFoundError:
        return False

    class Nothing(BaseTextEnv):  # type: ignore[misc]
        def __init__(self, env_config: Any, extras: Any) -> None:
            super().__init__()

        def step(self, action: str) -> Any:
            self.turns += 1
            said = [{"role": "user", "content": "on"}]
            return {"observations": said, "reward": 0.0, "done": self.turns == TURNS, "metadata": {}}

    skyrl_gym.register(id="nothing", entry_point=Nothing)
    return True


OUTSIDE = f"""
messages = ["Say."]
for _ in range({TURNS}):
    messages += [ask(*messages), "on"]
return 0.0
"""


def pool_of(task: str) -> PythonPool:
    records = [
        {"prompt": [{"role": "user", "content": f"Say {number}."}], "env_class": "nothing"} for number in range(GROUPS)
    ]
    return PythonPool(type="python", task_type=task, call=hand_over(records)[0])


def milliseconds(pool: TaskPool) -> float:
    """Returns the CPU time of this process for an episode."""
    tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY)
    settings = EnvironmentSettings(env_id="nothing", format="boxed", task_pool=pool)
    environment = Environment.from_settings(settings, tokenizer)
    engine = InstantEngine([*tokenizer.encode("said"), *environment.renderer.stop_ids])
    collector = Collector(engine, environment, 1000)  # type: ignore[arg-type]
    taken = []
    for number in range(ROUNDS + 1):
        problems = environment.pool.take(GROUPS)
        began = time.process_time()
        groups = collector.collect(problems, SAMPLES, Sampling(200), (number, "train")).groups
        taken.append((time.process_time() - began) * 1000 / (GROUPS * SAMPLES))
        assert all(len(one.turns) == TURNS for group in groups for one in group.trajectories)
    return statistics.median(taken[1:])  # the first imports and compiles


def main() -> None:
    sides: dict[str, TaskPool] = {"alone": pool_of(hand_over(Alone)[0]), "live": pool_of(hand_over(Live)[0])}
    if register_gym():
        sides["skyrl_gym"] = pool_of("skyrl_gym")
    with tempfile.TemporaryDirectory() as scratch:
        place = str(venv(Path(scratch), OUTSIDE))
        sides["outside"] = VerifiersPool(type="verifiers", venv=place, environment={"id": "sums", "tasks": GROUPS})
        found = {name: round(milliseconds(pool), 3) for name, pool in sides.items()}
    for name, value in found.items():
        beside = f"{value - found['alone']:+.3f} ms beside the same turns alone"
        print(f"{name:<10} {value:.3f} ms of CPU for an episode of {TURNS} turns, {beside}")
    print(json.dumps({"milliseconds": found, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
