"""An engine that answers by script and checks the protocol it is spoken to in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from nmoe.engine.api import Request
from nmoe.types import Sample

R = TypeVar("R")
Script = Callable[[Request, int], list[int] | Sample]


class ScriptedEngine:
    """Answers sample `index` of a request with `script(request, index)`: a sample, or token ids, which then end by a stop id or are
    cut at the request's limit. The samples come in turn, each at the end of a turn of the event loop."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.aborted: list[str] = []

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return asyncio.run(coroutine)

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        self.requests.append(request)
        try:
            for index in range(request.samples):
                await asyncio.sleep(0)
                yield index, self._sample(request, index)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.request_id)
            raise

    async def generate(self, request: Request) -> list[Sample]:
        return [sample async for _, sample in self.samples(request)]

    def _sample(self, request: Request, index: int) -> Sample:
        answer = self.script(request, index)
        if isinstance(answer, Sample):
            return answer
        ids: list[int] = []
        for token_id in answer[: request.sampling.max_new_tokens]:
            ids.append(token_id)
            if token_id in request.sampling.stop_ids:
                break
        stopped = bool(ids) and ids[-1] in request.sampling.stop_ids
        logprobs = [-0.25 - 0.5 * place for place in range(len(ids))]
        return Sample(ids, logprobs, [len(self.requests)] * len(ids), "stop" if stopped else "length")
