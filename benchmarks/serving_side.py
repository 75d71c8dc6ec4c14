"""The serving benchmark's side without a server: the engine alone."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path

from decode_workload import make_prompts
from machine import Stopwatch
from side import answer

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.model.checkpoint import load_model
from nmoe.types import Sampling

STREAMS = 64


class Alone:
    """The engine without a server. Answers (seed of the prompts, tokens) with seconds and CPU seconds."""

    def __init__(self, directory: Path) -> None:
        model = load_model(directory).requires_grad_(False)
        self.engine = NativeEngine(model, max_sequences=STREAMS)

    def reply(self, asked: tuple[int, int]) -> tuple[float, float]:
        seed, tokens = asked

        async def all_of_them() -> None:
            requests = [
                Request(tuple(prompt), 1, Sampling(tokens, seed=number), f"{seed}/{tokens}/{number}")
                for number, prompt in enumerate(make_prompts(STREAMS, seed))
            ]
            await asyncio.gather(*map(self.engine.generate, requests))

        with Stopwatch() as watch:
            self.engine.run(all_of_them())
        return watch.seconds, watch.cpu_seconds


def serve_alone(connection: Connection, directory: Path) -> None:
    answer(connection, Alone(directory).reply)
