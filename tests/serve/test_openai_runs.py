"""The engine's requests behind one request of a client: nothing is left of them where the client takes no more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.server.events import EventStream
from nmoe.model.transformer import Transformer
from nmoe.serve.openai.names import TokenNames
from nmoe.serve.openai.process import Options, _load
from nmoe.serve.openai.reading import Addition, Choice, TextReader
from nmoe.serve.openai.runs import Run, Steps
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sampling


def runs_of(tokenizer: Tokenizer, count: int, tokens: int) -> list[Run]:
    sampling = Sampling(tokens, 1.0, seed=1)
    return [
        Run(
            Request((70, 71), 1, sampling, f"run/{number}"),
            [Choice(number, TextReader(TokenNames(tokenizer), frozenset()), None, ())],
        )
        for number in range(count)
    ]


def test_a_client_that_takes_no_more_leaves_no_task(model: Transformer, tokenizer: Tokenizer) -> None:
    engine, runs = NativeEngine(model, 4), runs_of(tokenizer, 4, 400)

    async def left() -> int:
        steps = Steps(engine, runs, 60)
        await steps.take()
        while engine.stats().generated_tokens < 160:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(steps.close(), 5)
        return len(asyncio.all_tasks()) - 1

    assert engine.run(left()) == 0
    assert engine.stats().running == 0


def test_the_steps_of_several_runs_bring_all_their_tokens(model: Transformer, tokenizer: Tokenizer) -> None:
    engine, runs = NativeEngine(model, 4), runs_of(tokenizer, 3, 100)

    async def counts() -> dict[int, int]:
        counted: dict[int, int] = {}
        steps = Steps(engine, runs, 60)
        while additions := await steps.take():
            for added in additions:
                counted[added.index] = counted.get(added.index, 0) + len(added.token_ids)
        return counted

    assert engine.run(counts()) == {0: 100, 1: 100, 2: 100}


class Pipe(EventStream):
    """A stream whose client takes all of it at once, or nothing while it is not `free`."""

    free = True

    def __init__(self) -> None:
        self.pushed = list[bytes]()

    def push(self, data: bytes) -> None:
        self.pushed.append(data)
        self.free = len(self.pushed) % 3 > 0


def ids(additions: Sequence[Addition]) -> bytes:
    return bytes(token % 251 for added in additions for token in added.token_ids)


def test_tokens_come_in_order_whether_they_are_pushed_or_taken(model: Transformer, tokenizer: Tokenizer) -> None:
    engine, (whole,) = NativeEngine(model, 4), runs_of(tokenizer, 1, 100)

    async def tokens(pipe: Pipe | None) -> bytes:
        steps, found = Steps(engine, runs_of(tokenizer, 1, 100), 60), b""
        if pipe is not None:
            steps.push_into(pipe, ids)
        while additions := await steps.take():
            if pipe is not None:
                found += b"".join(pipe.pushed)
                pipe.pushed.clear()
                pipe.free = True
            found += ids(additions)
        return found + (b"".join(pipe.pushed) if pipe is not None else b"")

    (sample,) = engine.run(engine.generate(whole.request))
    expected = bytes(token % 251 for token in sample.token_ids)
    assert engine.run(tokens(None)) == expected
    assert engine.run(tokens(Pipe())) == expected


def test_what_cannot_be_written_ends_its_own_stream_alone(model: Transformer, tokenizer: Tokenizer) -> None:
    engine = NativeEngine(model, 4)

    def fail(additions: Sequence[Addition]) -> bytes:
        raise ArithmeticError("no such number")

    async def both() -> int:
        good_runs, bad_runs = ([run] for run in runs_of(tokenizer, 2, 100))
        good, bad = Steps(engine, good_runs, 60), Steps(engine, bad_runs, 60)
        bad.push_into(Pipe(), fail)

        async def taken(steps: Steps) -> int:
            count = 0
            while additions := await steps.take():
                count += sum(len(added.token_ids) for added in additions)
            return count

        async def failing() -> None:
            with pytest.raises(ArithmeticError, match="no such number"):
                await taken(bad)
            await bad.close()

        return (await asyncio.gather(taken(good), failing()))[0]

    assert engine.run(both()) == 100


def test_streams_go_on_between_the_pieces_of_a_long_prompt(checkpoint: Path) -> None:
    engine = _load(Options(checkpoint, device="cpu", threads=1)).engine

    async def steps_of(name: str) -> int:
        before = engine.stats().decode_steps
        await engine.generate(Request((70,) * 1500, 1, Sampling(1), name))
        return engine.stats().decode_steps - before

    async def alone_and_beside() -> tuple[int, list[int]]:
        alone = await steps_of("alone")
        running = engine.stream(Request((70, 71), 1, Sampling(2000), "runs"))
        await anext(running)
        beside = []
        for attempt in range(5):
            await engine.between_steps(engine.forget_prefixes)
            beside.append(await steps_of(f"beside {attempt}"))
        await running.aclose()
        return alone, beside

    alone, beside = engine.run(alone_and_beside())
    assert alone == 1
    # Three pieces, and the steps until the request has come, which are more where the event loop waits for a CPU.
    assert 3 <= min(beside) <= 5
