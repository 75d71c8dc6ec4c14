"""Times rollouts beside the engine: the environment's work per episode, and the engine's throughput while tools sleep.

    python benchmarks/rollouts.py                 both, a minute on two cores
    python benchmarks/rollouts.py --device cuda   the small model on a GPU, in bf16

Episodes are single turns, right and wrong answers in Harmony by turns, on an engine that answers at once: prompt, state machine,
grade and record are all that is left. Episodes of a `MultiTurnEnv` with three turns are timed in the same way. Throughput is
that of 256 trajectories at once on a small dense model (width 96, two layers, random weights, fp32), three turns of 256 to
511 tokens each: with a tool between turns that sleeps a second, with one that answers at once, and as many tokens without
any tool. A random model calls nothing, so that the calls are put in its mouth; all else is the real path. The last line
printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from machine import machine, versions
from on_device import add_device, random_model

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.tables.pools import GeneratedPool
from nmoe.config.tables.rollout import BudgetSettings, ToolsSettings
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.envs.tasks.conversation import AssistantTurn
from nmoe.envs.tasks.own import MultiTurnEnv
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import keep_freed_memory
from nmoe.rollout.collector import Collector
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Sample, Sampling, ToolCall

R = TypeVar("R")

PROBLEMS, GROUP = 64, 16
TRAJECTORIES, TURNS = 256, 3
SHORTEST, LONGEST = 256, 511
SLEEP_S = 1.0


async def nap(seconds: float) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return "rested"


def tokenizer() -> Tokenizer:
    words = "Reverse: 0123456789 <|start|>assistant user developer analysis commentary final functions the answer is"
    return Tokenizer.train([words] * 20, 400)


def environment(tools: Sequence[str] = ()) -> Environment:
    settings = EnvironmentSettings(
        env_id="benchmark",
        task_pool=GeneratedPool(type="generated", task_type="reverse", difficulty=(8, 8)),
        tools=ToolsSettings(use=tuple(tools)) if tools else None,
        budget=BudgetSettings(turns=TURNS, tool_calls=TURNS),
    )
    return Environment.from_settings(settings, tokenizer())


class InstantEngine:
    """Answers every sample at once: a right answer, then a wrong one, and so on."""

    def __init__(self, harmony: Harmony) -> None:
        """`answer` is every answer, where it is set."""
        self._harmony = harmony
        self._gold: dict[tuple[int, ...], str] = {}
        self.answer = ""

    def learn(self, prompt_ids: tuple[int, ...], gold: str) -> None:
        self._gold[prompt_ids] = gold

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return asyncio.run(coroutine)

    async def generate(self, request: Request) -> list[Sample]:
        return [sample async for _, sample in self.samples(request)]

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        gold = self.answer or self._gold[request.prompt_ids]
        for index in range(request.samples):
            text = gold if index % 2 else gold[::-1]
            yield index, self.sample(text)

    def sample(self, text: str) -> Sample:
        thought = Message("assistant", "reversed, that is", channel="analysis")
        ids = self._harmony.render_completion([thought, Message("assistant", text, channel="final")])
        return Sample(ids, [-0.1] * len(ids), [0] * len(ids), "stop")


def episode_overhead(repeats: int) -> dict[str, Any]:
    """Milliseconds per episode that the environment adds to the engine's own."""
    demo = environment()
    harmony = Harmony(tokenizer())
    problems = demo.pool.take(PROBLEMS)
    engine = InstantEngine(harmony)
    for problem in problems:
        engine.learn(tuple(demo.prompts.ids(problem)), problem.gold)
    collector = Collector(engine, demo, 4096)  # type: ignore[arg-type]

    async def engine_alone() -> None:
        async def one(prompt_ids: tuple[int, ...]) -> None:
            request = Request(prompt_ids, GROUP, collector_sampling, "alone")
            async for _ in engine.samples(request):
                pass

        await asyncio.gather(*(one(tuple(demo.prompts.ids(problem))) for problem in problems))

    both: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):  # the first is warming up
        began = time.perf_counter()
        groups = collector.collect(problems, GROUP, Sampling(256), (0, "benchmark", repeat)).groups
        whole = time.perf_counter() - began
        collector_sampling = groups[0].trajectories[0].sampling
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        assert statistics.mean(trajectory.grade.extras["correctness"] for trajectory in trajectories) == 0.5
        began = time.perf_counter()
        for trajectory in trajectories:
            trajectory.record(1, "")
        records = time.perf_counter() - began
        began = time.perf_counter()
        engine.run(engine_alone())
        both.append((whole - (time.perf_counter() - began), records))
    episodes = PROBLEMS * GROUP
    overhead = statistics.median(one for one, _ in both[1:]) / episodes * 1e3
    record = statistics.median(one for _, one in both[1:]) / episodes * 1e3
    return {"episodes": episodes, "overhead_ms": overhead, "record_ms": record}


class Count(MultiTurnEnv):
    """An episode of `TURNS` turns that any answer passes."""

    def prompt(self) -> str:
        self.turns = 0
        return f"Count {self.rng.random()}."

    def step(self, turn: AssistantTurn) -> tuple[str | None, float, bool]:
        self.turns += 1
        return "Go on.", 1 / TURNS, self.turns == TURNS


def multi_turn_overhead(repeats: int) -> dict[str, Any]:
    """CPU milliseconds per episode of a `MultiTurnEnv` with `TURNS` turns, all of it but the engine's sampling."""
    settings = EnvironmentSettings(env_id="count", format="harmony", task="rollouts:Count")
    demo = Environment.from_settings(settings, tokenizer())
    engine = InstantEngine(Harmony(tokenizer()))
    engine.answer = "1"
    collector = Collector(engine, demo, 4096)  # type: ignore[arg-type]
    problems = demo.pool.take(PROBLEMS)
    times = []
    for repeat in range(repeats + 1):  # the first is warming up
        began = time.process_time()
        groups = collector.collect(problems, GROUP, Sampling(256), (0, "benchmark", repeat)).groups
        times.append(time.process_time() - began)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        assert all(len(trajectory.exchanges) == TURNS for trajectory in trajectories)
    return {"turns": TURNS, "overhead_ms": statistics.median(times[1:]) / (PROBLEMS * GROUP) * 1e3}


class FixedTurns:
    """The native engine with turns of set lengths that all end by themselves, however a random model rambles."""

    def __init__(self, engine: NativeEngine, tokens: Sequence[int]) -> None:
        self._engine, self._tokens = engine, tokens

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return self._engine.run(coroutine)

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        length = self._tokens[request.sampling.seed % len(self._tokens)]
        fixed = replace(request, sampling=replace(request.sampling, max_new_tokens=length, stop_ids=()))
        async for index, sample in self._engine.samples(fixed):
            yield index, replace(sample, finish_reason="stop")

    async def generate(self, request: Request) -> list[Sample]:
        return [sample async for _, sample in self.samples(request)]


def throughput(model: Transformer, sleep_s: float | None) -> dict[str, float]:
    """Tokens per second of all trajectories: with a tool that sleeps so long between turns; None: in one turn, without tools."""
    demo = environment([] if sleep_s is None else ["rollouts:nap"])
    lengths: Sequence[int] = range(SHORTEST, LONGEST + 1)
    if sleep_s is None:
        lengths = [length * TURNS for length in lengths]
    else:

        def calls(turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
            return [ToolCall("nap", json.dumps({"seconds": sleep_s}), f"{turn}/0")] if turn < TURNS - 1 else []

        demo.renderer.calls = calls  # type: ignore[method-assign]
    native = NativeEngine(model, TRAJECTORIES)
    collector = Collector(FixedTurns(native, lengths), demo, model.config.context_tokens)  # type: ignore[arg-type]
    problems = demo.pool.take(TRAJECTORIES)
    collected = collector.collect(problems, 1, Sampling(TURNS * LONGEST), (0, "benchmark"))
    trajectories = [group.trajectories[0] for group in collected.groups]
    tokens = sum(trajectory.sampled_tokens for trajectory in trajectories)
    calls_made = sum(len(trajectory.tool_events) for trajectory in trajectories)
    assert calls_made == (0 if sleep_s is None else TRAJECTORIES * (TURNS - 1))
    stats = native.stats()
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / collected.rollout_s,
        "seconds": collected.rollout_s,
        "engine_busy_s": stats.busy_s,
        "prefix_hit_share": stats.prefix_hit_tokens / (stats.prefix_hit_tokens + stats.prefilled_tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7, help="medians of so many runs of the episodes")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0: torch's own choice")
    add_device(parser)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    overhead = episode_overhead(arguments.repeats)
    print(
        f"single turn: {overhead['overhead_ms']:.3f} ms per episode beyond the engine, {overhead['record_ms']:.3f} ms per record"
    )
    several = multi_turn_overhead(arguments.repeats)
    print(f"{TURNS} turns of a MultiTurnEnv: {several['overhead_ms']:.3f} ms of CPU per episode")
    config = ModelConfig(
        vocab_size=512,
        hidden_size=96,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=48,
        intermediate_size=256,
        context_tokens=2048,
    )
    model = random_model(config, arguments.device)
    results: dict[str, dict[str, float]] = {}
    for name, sleep_s in (("none", None), ("instant", 0.0), ("sleeping", SLEEP_S)):
        result = results[name] = throughput(model, sleep_s)
        print(f"tools {name}: {result['tokens_per_second']:,.0f} tokens/s over {result['seconds']:.1f} s", flush=True)
    sleeping = results["sleeping"]["tokens_per_second"]
    ratios = {name: sleeping / results[name]["tokens_per_second"] for name in ("none", "instant")}
    print(
        f"sleeping tools leave {ratios['none']:.2f} of the throughput without tools, {ratios['instant']:.2f} of instant ones'"
    )
    line = {
        "episode": overhead,
        "multi_turn": several,
        "concurrent": {"trajectories": TRAJECTORIES, "turns": TURNS, "sleep_s": SLEEP_S, **results},
        "ratio": ratios,
        "device": str(arguments.device),
        "machine": machine(),
        "versions": versions("nmoe", "torch"),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
