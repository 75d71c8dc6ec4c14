"""The engine protocol: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from nmoe.types import FinishReason, Sample, Sampling


@dataclass(frozen=True)
class Request:
    """A request to an engine: a prompt, of which `samples` continuations are sampled.

    With `top_logprobs = k` each streamed token comes with its raw log-probability and the k likeliest tokens (0: with none of
    these). `adapter` names one of the engine's adapters; None is the model as it is. Of requests that wait for a server, a lower
    `order` is sent first.

    Example: `Request((200006, 1428), samples=8, sampling=Sampling(64, stop_ids=(200002,)), request_id="12/0")`.
    """

    prompt_ids: tuple[int, ...]
    samples: int
    sampling: Sampling
    request_id: str
    top_logprobs: int | None = None
    adapter: str | None = None
    order: int = 0


class RawLogprob(NamedTuple):
    """The log-probability of a token, and the likeliest tokens with theirs, the largest first and of equal ones the lower id first.

    Natural logarithms of the softmax of the model's own logits in fp32, before bias, penalties, temperature and truncation.
    Example: `RawLogprob(-1.2, ((17, -0.4), (9, -1.2)))`.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)  # not frozen: that takes five times as long to make, and each streamed token makes one
class Delta:
    """One sampled token of a streamed completion: of the sample `index`, with its log-probability as in `Sample.logprobs`, and, if
    asked for, its `raw` one.

    The last delta of each sample has its `finish_reason` and the whole `sample`. A sample that is aborted ends with a delta that
    has no token: `token_id` is None there, and `logprob` 0.
    """

    token_id: int | None
    logprob: float
    finish_reason: FinishReason | None
    index: int = 0
    raw: RawLogprob | None = None
    sample: Sample | None = None


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine started, and its present load.

    `prefix_hit_tokens` were found in the cache instead of being prefilled. `decode_steps` counts the engine's steps, and `busy_s`
    the seconds that they took. `preemptions` counts how often a sequence lost its cache blocks to an older one for a while.
    `running` sequences decode; `waiting` ones have not started, or have lost their blocks. `cache_use` is the share of the cache's
    blocks that unfinished sequences hold.
    """

    generated_tokens: int
    prefilled_tokens: int
    prefix_hit_tokens: int
    decode_steps: int
    preemptions: int
    running: int
    waiting: int
    cache_use: float
    busy_s: float


R = TypeVar("R")


class Engine(Protocol):
    """The interface of an inference engine, as rollouts use it.

    `generate` returns all samples of a request in order of their index. `samples` yields each of them with its index as it
    finishes, so that none waits for a longer one. `score` returns the log-probability of every token but the first, given those
    before it, at this temperature.

    `run` runs a coroutine that awaits the other methods, and returns its result; an engine of this process computes on the calling
    thread meanwhile. Cancelling a caller of `samples` or `generate` ends its request.

    `update_weights` takes the weights that `Learner.publish` hands over; tokens sampled from then on carry `version`. The source is
    the learner's model with all its weights, or a `nmoe.model.lora.Lora`: then the engine keeps its base, and only
    `nmoe.model.peft_format.adapter_tensors(source)` are new. An engine that runs the source's own module has nothing to copy.

    `forget_prefixes` forgets the keys and values of earlier prompts. With fast numerics a cached prefix can give other bits than
    one that is computed, so that a run which has to repeat starts each step without any. `sleep` frees memory that the learner can
    use while nothing is sampled. Both are called between two calls of `run`. `metrics` returns figures for the run's metrics, of
    the last publication of weights and of engines that were lost; an engine of this process has none.
    """

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R: ...

    def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]: ...

    async def generate(self, request: Request) -> list[Sample]: ...

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]: ...

    async def update_weights(self, source: Any, version: int) -> None: ...

    def forget_prefixes(self) -> None: ...

    def sleep(self) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def stats(self) -> EngineStats: ...
