"""An engine that samples by a user's function: `generate_fn(request, engine) -> list[Sample]`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from nmoe.engine.api import Engine, EngineStats, R, Request
from nmoe.engine.checked import fault_of
from nmoe.errors import UserError, shown
from nmoe.model.config import ModelConfig
from nmoe.types import Sample

GenerateFunction = Callable[[Request, Engine], "list[Sample] | Awaitable[list[Sample]]"]


class FunctionEngine:
    """An engine that gives every request for samples to a user's function, and forwards all other calls to another engine, which
    the function may use.

    The function's result is checked: it has as many samples as were asked for, with a log-probability and a weight version for
    every token. Arrays and tensors become lists. `generate` raises UserError for any other result.
    """

    def __init__(
        self,
        engine: Engine,
        function: GenerateFunction,
        version: Callable[[], int] | None,
        model: ModelConfig,
        named: str = "generate_fn",
    ) -> None:
        """Keeps the function, and the engine that it may use. `version` returns the version of the weights, which fills `versions`
        where a sample leaves them empty. Without it each sample has to say its own, since the weights may change meanwhile.
        `model` bounds the ids of tokens and experts. `named` begins the messages."""
        self._named = named
        self._engine, self._function, self._version, self._model = engine, function, version, model

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return self._engine.run(coroutine)

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        for index, sample in enumerate(await self.generate(request)):
            yield index, sample

    async def generate(self, request: Request) -> list[Sample]:
        returned: Any = self._function(request, self._engine)
        if inspect.isawaitable(returned):
            returned = await returned
        if not isinstance(returned, list) or len(returned) != request.samples:
            raise UserError(f"{self._named}: it returned {shown(returned)}, not a list of {request.samples} samples")
        for index, sample in enumerate(returned):
            if isinstance(sample, Sample):
                _as_lists(sample)
                if isinstance(sample.token_ids, list) and not sample.versions:
                    if self._version is not None:
                        sample.versions = [self._version()] * len(sample.token_ids)
                    elif sample.token_ids:
                        raise UserError(
                            f"{self._named}: sample {index} of request {request.request_id!r} has no versions, and the weights may "
                            "have changed while it was sampled; keep the engine's versions, or set async.max_staleness = 0"
                        )
            if fault := fault_of(sample, request, self._model):
                raise UserError(f"{self._named}: sample {index} of request {request.request_id!r} {fault}")
        return returned

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        return await self._engine.score(token_ids, temperature)

    async def update_weights(self, source: Any, version: int) -> None:
        await self._engine.update_weights(source, version)

    def forget_prefixes(self) -> None:
        self._engine.forget_prefixes()

    def sleep(self) -> None:
        self._engine.sleep()

    def metrics(self) -> dict[str, float]:
        return self._engine.metrics()

    def stats(self) -> EngineStats:
        return self._engine.stats()


def _as_lists(sample: Sample) -> None:
    """Converts a sample's arrays, tensors and tuples to lists of Python's numbers, in place."""
    for name in ("token_ids", "logprobs", "versions", "kept_ids"):
        setattr(sample, name, _plain(getattr(sample, name)))


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
