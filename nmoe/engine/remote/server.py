"""One engine server as its client sees it: nmoe's own (`python -m nmoe.engine.server`) or vLLM with nmoe's plugin; SGLang's calls
are in `nmoe.engine.remote.sglang`."""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from nmoe.engine.api import Request
from nmoe.engine.checked import fault_of
from nmoe.engine.remote.wire import (
    GENERATE,
    UNPUBLISHED,
    WEIGHTS_ID,
    WireError,
    decode_samples,
    encode_request,
    error_of,
)
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.config import ModelConfig
from nmoe.parsing import json_of
from nmoe.types import Sample, Sampling

# Seconds that a call of control may take: it copies no weights, or waits for a step of the engine.
CONTROL_S = 60.0
# Bytes of weights that a server takes in a second, at least.
_BYTES_PER_S = 20e6
# Tokens by which the weights of a server are known again.
PROBED = 8
# Of this process, so that no other one's cached keys and values are used.
_PROCESS = secrets.token_hex(8)
# The largest difference of a log-probability that is rounding, in float32 and in other precisions.
_ROUNDING, _ROUNDING_16 = 1e-3, 0.2


class ServerLostError(InfrastructureError):
    """A server does not answer, or answered with an internal error, or with samples that cannot be right."""


@dataclass(frozen=True)
class Served:
    """The model of a server that nothing is published to. `model` is the fingerprint of the checkpoint that nmoe's server was
    started with, or the path from which another server loaded its model, whose vocabulary it does not say. `version` is the
    weights', and `weights` a digest of what they sample after one token: other weights have another one, and a busy server can
    round differently."""

    engine: str
    model: str
    vocab_size: int | None
    context_tokens: int
    version: int
    weights: str = field(compare=False)

    def __str__(self) -> str:
        model = self.model[:12] if self.engine == "nmoe" else self.model
        version = "unpublished weights" if self.version == UNPUBLISHED else f"version {self.version}"
        return f"{self.engine}, model {model}, {version}, context {self.context_tokens:,}"


@dataclass(frozen=True)
class Probe:
    """What a server sampled after one token, by which its weights are told from others. `rounding` is the largest difference of a
    log-probability that is none of the weights."""

    token_ids: list[int]
    logprobs: list[float]
    rounding: float

    def is_of_other_weights(self, than: Probe) -> bool:
        """Whether the first token or a log-probability differs. Later tokens are compared as far as they are the same, because
        rounding can choose another one."""
        rounding = max(self.rounding, than.rounding)
        pairs = zip(self.token_ids, self.logprobs, than.token_ids, than.logprobs, strict=False)
        for position, (token, logprob, other_token, other_logprob) in enumerate(pairs):
            if token != other_token:
                return position == 0
            if abs(logprob - other_logprob) > rounding:
                return True
        return False


class Answered(Protocol):
    """A reply of HTTP."""

    @property
    def status_code(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def content(self) -> bytes: ...


class Client(Protocol):
    """What carries requests to servers: `nmoe.engine.remote.connections.Connections`. Raises OSError where no whole reply comes."""

    async def request(
        self, method: str, url: str, *, json: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> Answered: ...


class EngineServer:
    """The routes of one server. Every call has a deadline, or its caller watches it. Raises ServerLostError where the server is at
    fault, and WireError with HTTP's status where it refuses the request."""

    def __init__(self, name: str, url: str, client: Client, model: ModelConfig) -> None:
        """`name` is for messages. `client` carries the key and belongs to the event loop that calls."""
        self.name, self.url = name, url.rstrip("/")
        self._client, self._model = client, model
        self._keeps, self._weights = False, ""  # the header that every reply has to have

    async def generate(
        self,
        request: Request,
        version: int | None,
        attempt: int,
        deadline_s: float | None,
        newest: Callable[[], int | None] = lambda: None,
    ) -> list[Sample]:
        """Returns a request's samples, every one of them checked. `version` is the last one that was published here: tokens of
        any other have the wrong weights. None takes any. `newest` returns the last version that was published here meanwhile, up to
        which later tokens may be."""
        # A server refuses a second request of the same id, which may still run where its client gave up.
        named = Request(request.prompt_ids, request.samples, request.sampling, f"{request.request_id}#{attempt}")
        path, body = self._asked(named, version)
        status, reply = await self._call(path, deadline_s, body)
        if status >= 500:
            raise ServerLostError(f"{self.name} answered with status {status}: {error_of(reply)}")
        try:
            samples = self._answered(status, reply, named)
        except WireError as error:
            if error.status != 200:
                raise
            raise ServerLostError(f"{self.name}: {error}") from None
        for index, sample in enumerate(samples):
            fault = fault_of(sample, request, self._model)
            if fault is None and version is not None and not _in_order(sample.versions, version, newest() or version):
                fault = f"has tokens of the weight versions {sorted(set(sample.versions))}, and {version} was published"
            if fault is not None:
                raise ServerLostError(f"{self.name}: sample {index} of request {request.request_id!r} {fault}")
        return samples

    def _asked(self, request: Request, version: int | None) -> tuple[str, dict[str, Any]]:
        """Returns the route and the body that ask for a request's samples."""
        return GENERATE, encode_request(request) | {"cache_salt": salt_of(version)}

    def _answered(self, status: int, reply: bytes, request: Request) -> list[Sample]:
        """Reads a reply. Raises WireError for a refusal, and for a reply that is torn or answers another request."""
        return decode_samples(status, reply, request)

    async def control(
        self, path: str, body: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None, size: int = 0
    ) -> None:
        """Posts to a route that controls the engine, such as `/pause`. The deadline grows with `size`, the bytes of weights that
        the engine reads before it answers."""
        status, reply = await self._call(path, CONTROL_S + size / _BYTES_PER_S, body or {}, params)
        if status != 200:
            raise ServerLostError(f"{self.name}{path} answered with status {status}: {error_of(reply)}")

    async def refuse_sleep(self) -> None:
        """Raises ServerLostError for a vLLM that sleeps. A server without the route has no sleep."""
        status, reply = await self._call("/is_sleeping", CONTROL_S)
        if status == 200 and b"true" in reply:
            raise ServerLostError(
                f"{self.name} sleeps, and weights that come now are lost when it wakes; post /wake_up to it"
            )

    async def info(self) -> dict[str, Any] | None:
        """Returns what nmoe's own server says of itself; None for another server that is healthy."""
        status, reply = await self._call("/nmoe/info", CONTROL_S)
        if status == 404:
            status, reply = await self._call("/health", CONTROL_S)
            reply = b"null"
        if status != 200:
            raise ServerLostError(f"{self.name} answered with status {status}: {error_of(reply)}")
        try:
            described = json_of(reply)
            if not isinstance(described, dict | None):
                raise ValueError("no object")
        except ValueError:
            raise ServerLostError(f"{self.name} is no engine server: it answered {reply[:80]!r}") from None
        return described

    async def served(self, deadline_s: float) -> tuple[Served, Probe]:
        """Returns what this server serves; it samples for this, behind the requests that it has. From now on every reply has to
        come from the same process and weights, where the server names them. Raises WireError and ServerLostError for a server
        that does not sample."""
        self._keeps = False
        if (info := await self.info()) is None:
            status, reply = await self._call("/v1/models", CONTROL_S)
            try:
                card = json_of(reply)["data"][0]
                info = {
                    "engine": card["owned_by"],
                    "fingerprint": card["root"],
                    "context_tokens": card["max_model_len"],
                }
            except (ValueError, TypeError, LookupError):
                raise ServerLostError(
                    f"{self.name}/v1/models names no model: status {status}: {error_of(reply)}"
                ) from None
        self._keeps = True
        probe = Request((0,), 1, Sampling(PROBED), f"probe/{time.monotonic_ns()}")
        (sample,) = await self.generate(probe, None, 1, deadline_s)
        if sample.finish_reason == "abort":
            raise ServerLostError(f"{self.name} was made to abort the request by which its weights are known")
        digest = hashlib.blake2b(repr((sample.token_ids, sample.logprobs)).encode(), digest_size=8).hexdigest()
        named = info["engine"], info["fingerprint"], info.get("vocab_size"), info["context_tokens"]
        rounding = _ROUNDING if info.get("precision") == "float32" else _ROUNDING_16
        return Served(*named, sample.versions[0], digest), Probe(sample.token_ids, sample.logprobs, rounding)

    async def score(
        self, token_ids: Sequence[int], temperature: float, version: int, deadline_s: float | None
    ) -> list[float]:
        """Returns the log-probability of every token but the first, under this version of the weights. Raises UserError for a
        server without this route."""
        status, reply = await self._call(
            "/score", deadline_s, {"token_ids": list(token_ids), "temperature": temperature}
        )
        if status == 404:
            raise UserError(f"{self.name} cannot score given tokens, which only nmoe's own server can: start that one")
        if status != 200:
            raise ServerLostError(f"{self.name} answered with status {status}: {error_of(reply)}")
        try:
            answer = json_of(reply)
            scores, found = list(answer["logprobs"]), answer["weight_version"]
            if len(scores) != len(token_ids) - 1 or not all(map(math.isfinite, scores)):
                raise ValueError(
                    f"{len(scores)} log-probabilities for {len(token_ids)} tokens, all of which have to be numbers"
                )
            if found != str(version):
                raise ValueError(f"they are by version {found}, and {version} is wanted")
        except (ValueError, TypeError, KeyError) as error:
            raise ServerLostError(f"{self.name}: the scores cannot be used: {error}") from None
        return scores

    async def _call(
        self,
        path: str,
        deadline_s: float | None,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        method = "GET" if body is None else "POST"
        # Counted from the request, not from the last byte: a server that trickles would never be late.
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                reply = await self._client.request(method, self.url + path, json=body, params=params)
        except OSError as error:
            if deadline.expired():
                raise ServerLostError(f"{self.name}{path} gave no answer within {deadline_s:.0f} s") from None
            raise ServerLostError(f"{self.name}{path}: {type(error).__name__} {error}") from None
        if reply.status_code == 401:
            raise ServerLostError(
                f"{self.name} refused the key; set NMOE_ENGINE_KEY to the key that it was started with"
            )
        if reply.status_code == 403:
            raise ServerLostError(f"{self.name}{path} is closed: {error_of(reply.content)}")
        weights = reply.headers.get(WEIGHTS_ID, "")
        if not self._keeps:
            self._weights = weights
        elif weights != self._weights:
            raise ServerLostError(f"{self.name} was started again or has taken weights since it was asked first")
        return reply.status_code, reply.content


def salt_of(version: int | None) -> str:
    """Returns the text under which a server may use cached keys and values again. A resumed run counts versions again, with other
    weights. vLLM takes no "/", "@" or backslash in it, and 128 characters at most."""
    return f"{version}-{_PROCESS}"


def _in_order(versions: Sequence[int], first: int, last: int) -> bool:
    """Whether the versions of a sample's tokens rise, from `first` to `last` at most."""
    return all(earlier <= later for earlier, later in pairwise([first, *versions, last]))
