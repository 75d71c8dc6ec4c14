"""An engine that samples by a user's function: `generate_fn(request, engine) -> list[Sample]`."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, get_args

import numpy as np

from nmoe.engine.api import Delta, Engine, EngineStats, R, Request
from nmoe.errors import UserError, shown
from nmoe.model.config import ModelConfig
from nmoe.types import FinishReason, Sample

GenerateFunction = Callable[[Request, Engine], "list[Sample] | Awaitable[list[Sample]]"]


class FunctionEngine:
    """Gives every request to the function, and forwards all other calls to the engine, which the function may use.

    What the function returns is checked: one sample for each that was asked for, with a log-probability and a weight
    version for every token. Arrays and tensors are taken for lists. Raises UserError for anything else.
    """

    def __init__(
        self, engine: Engine, function: GenerateFunction, version: Callable[[], int], model: ModelConfig
    ) -> None:
        """`version` returns the version of the weights, for samples whose `versions` are empty: a function that samples by the
        engine's weights need not know it. `model` says which tokens and experts there are."""
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
            raise UserError(f"generate_fn: it returned {shown(returned)}, not a list of {request.samples} samples")
        for index, sample in enumerate(returned):
            if isinstance(sample, Sample):
                _as_lists(sample)
                if isinstance(sample.token_ids, list) and not sample.versions:
                    sample.versions = [self._version()] * len(sample.token_ids)
            if fault := _fault(sample, request, self._model):
                raise UserError(f"generate_fn: sample {index} of request {request.request_id!r} {fault}")
        return returned

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        return await self._engine.score(token_ids, temperature)

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        return self._engine.stream(request)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def update_weights(self, source: Any, version: int) -> None:
        await self._engine.update_weights(source, version)

    def stats(self) -> EngineStats:
        return self._engine.stats()


def _as_lists(sample: Sample) -> None:
    """Arrays, tensors and tuples as lists, and their numbers as Python's."""
    for name in ("token_ids", "logprobs", "versions", "kept_ids"):
        setattr(sample, name, _plain(getattr(sample, name)))


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _fault(sample: Any, request: Request, model: ModelConfig) -> str | None:
    """The fault of a sample, if it has one."""
    if not isinstance(sample, Sample):
        return f"is {shown(sample)}, not a Sample"
    for name in ("token_ids", "logprobs", "versions"):
        if not isinstance(value := getattr(sample, name), list):
            return f"has {name} = {shown(value)}, not a list"
    count = len(sample.token_ids)
    if not 0 < count <= request.sampling.max_new_tokens:
        return f"has {count} tokens; between 1 and max_new_tokens = {request.sampling.max_new_tokens} were asked for"
    if len(sample.logprobs) != count or len(sample.versions) != count:
        return (
            f"has {count} tokens, {len(sample.logprobs)} log-probabilities and {len(sample.versions)} versions; "
            "each token has one of each"
        )
    if not _all_below(model.vocab_size, sample.token_ids):
        return f"has a token that is not a whole number from 0 to {model.vocab_size - 1}"
    if not all(isinstance(value, int | float) and math.isfinite(value) and value <= 1e-6 for value in sample.logprobs):
        return "has a log-probability that is not a finite number of at most 0"
    if not all(isinstance(version, int) for version in sample.versions):
        return "has a version that is not a whole number"
    if sample.finish_reason not in get_args(FinishReason):
        return f"has the finish reason {sample.finish_reason!r}, not one of {', '.join(get_args(FinishReason))}"
    kept = sample.kept_ids
    # The learner scores a token over the kept set of its position.
    if kept is not None and not (
        isinstance(kept, list)
        and len(kept) == count
        and all(isinstance(ids, list) and _all_below(model.vocab_size, ids) for ids in kept)
        and all(not ids or token in ids for token, ids in zip(sample.token_ids, kept, strict=True))
    ):
        return "has kept_ids that are not a list of tokens for each token, itself among them"
    shape = len(request.prompt_ids) + count - 1, len(model.moe_layers), model.experts_per_token
    if sample.routes is not None and not (
        isinstance(sample.routes, np.ndarray)
        and sample.routes.dtype.kind in "iu"
        and sample.routes.shape == shape
        and bool(((sample.routes >= 0) & (sample.routes < model.experts)).all())
    ):
        return f"has routes that are not experts' numbers in a NumPy array {list(shape)} [positions, layers, experts per token]"
    if (sample.finish_reason == "stop") != (sample.token_ids[-1] in request.sampling.stop_ids):
        return (
            f"has the finish reason {sample.finish_reason!r} and ends with token {sample.token_ids[-1]}; "
            "`stop` means a stop token"
        )
    return None


def _all_below(vocabulary: int, ids: list[Any]) -> bool:
    return all(isinstance(one, int) and 0 <= one < vocabulary for one in ids)
