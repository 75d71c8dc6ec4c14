"""The engine's requests behind one request of a client: nothing is left of them where the client takes no more."""

from __future__ import annotations

import asyncio

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.model.transformer import Transformer
from nmoe.serve.openai.names import TokenNames
from nmoe.serve.openai.reading import Choice, TextReader
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
