"""What a server is asked for samples by, and its replies, read without trust: the token route of nmoe and vLLM, or OpenAI's
completions with log-probabilities."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nmoe.engine.remote.wire import GENERATE
from nmoe.referee.client import Client, Exchange, UnansweredError, shown_bytes

_PREFIX = "generate-tokens-"  # of request ids in vLLM's replies
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Asked:
    """A request for samples. `salt` keeps prefixes of requests with another one apart."""

    prompt: tuple[int, ...]
    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[int, ...] = ()
    seed: int = 0
    salt: str | None = None
    request_id: str = ""
    stream: bool = False


@dataclass
class Choice:
    """One sample as the server gave it. `spans` are (version, start, end); `kept` the ids that each token was drawn from."""

    index: Any
    tokens: list[int]
    logprobs: list[float]
    finish: Any
    spans: list[tuple[str, int, int]] | None = None
    kept: list[list[int]] | None = None
    routes: Any = None

    def versions(self) -> list[str]:
        """Returns the version of each token, as far as spans name one."""
        found = [""] * len(self.tokens)
        for version, start, end in self.spans or []:
            found[start:end] = [version] * (end - start)
        return found


@dataclass
class Reply:
    """The reply to a request. `named` and `prompt` are the request and the prompt that it says it answers, or None."""

    asked: Asked
    exchange: Exchange
    choices: list[Choice] = field(default_factory=list)
    named: Any = None
    prompt: Any = None

    @property
    def status(self) -> int:
        return self.exchange.status


class MalformedError(Exception):
    """A reply of status 200 is not of the form that it has to have."""

    def __init__(self, message: str, exchange: Exchange) -> None:
        super().__init__(message)
        self.exchange = exchange


class TokenRoute:
    """`POST /inference/v1/generate` with token ids."""

    name, path, raw = "the token route", GENERATE, False

    def body(self, asked: Asked) -> dict[str, Any]:
        params: dict[str, Any] = {
            "n": asked.n,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "seed": asked.seed,
            "stop_token_ids": list(asked.stop),
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
        }
        if asked.min_p:
            params["min_p"] = asked.min_p
        body = {
            "request_id": asked.request_id,
            "token_ids": list(asked.prompt),
            "sampling_params": params,
            "stream": asked.stream,
            "return_token_ids": True,
        }
        return body if asked.salt is None else body | {"cache_salt": asked.salt}

    def read(self, asked: Asked, exchange: Exchange) -> Reply:
        """Raises MalformedError."""
        body = _object(exchange)
        reply = Reply(asked, exchange, [], _id(body.get("request_id")), body.get("prompt_token_ids"))
        for choice in _choices(body, exchange):
            try:
                content = (choice.get("logprobs") or {}).get("content") or []
                logprobs = [_number(one["logprob"]) for one in content]
                spans = choice.get("weight_versions")
                read = Choice(
                    choice.get("index"),
                    list(choice["token_ids"]),
                    logprobs,
                    choice.get("finish_reason"),
                    None
                    if spans is None
                    else [(str(one["version"]), int(one["start"]), int(one["end"])) for one in spans],
                    choice.get("sampling_mask"),
                    None if choice.get("routed_experts") is None else _array(choice["routed_experts"]),
                )
                for token, one in zip(read.tokens, content, strict=False):
                    name = one["token_id"] if "token_id" in one else one.get("token", token)
                    if name not in (token, f"token_id:{token}"):
                        raise ValueError(f"token {token} has the log-probability of {name!r}")
                reply.choices.append(read)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise MalformedError(f"a sample cannot be read: {type(error).__name__}: {error}", exchange) from None
        return reply

    def read_stream(self, asked: Asked, exchange: Exchange) -> Reply:
        """Joins the events of a stream. Raises MalformedError."""
        merged: dict[Any, Choice] = {}
        named, ended = None, False
        for line in exchange.reply.decode("utf-8", "replace").splitlines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or not data:
                continue
            if data == "[DONE]":
                ended = True
                continue
            try:
                body = json.loads(data)
                named = _id(body.get("request_id")) or named
                for choice in body["choices"]:
                    into = merged.setdefault(choice["index"], Choice(choice["index"], [], [], None))
                    into.tokens += choice["token_ids"] or []
                    into.logprobs += [
                        _number(one["logprob"]) for one in (choice.get("logprobs") or {}).get("content") or []
                    ]
                    into.finish = choice.get("finish_reason") or into.finish
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise MalformedError(
                    f"an event of the stream cannot be read: {error}: {data[:120]}", exchange
                ) from None
        if not ended:
            raise MalformedError("the stream does not end with [DONE]", exchange)
        return Reply(asked, exchange, [merged[index] for index in sorted(merged, key=str)], named)


class Completions:
    """OpenAI's `POST /v1/completions`, with log-probabilities of the untruncated distribution at temperature 1."""

    name, path, raw = "OpenAI's completions", COMPLETIONS, True

    def __init__(self, model: str) -> None:
        self.model = model

    def body(self, asked: Asked) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(asked.prompt),
            "n": asked.n,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "seed": asked.seed % 2**31,
            "logprobs": 1,
            "return_token_ids": True,
            "stream": asked.stream,
            **({"top_k": asked.top_k} if asked.top_k else {}),
            **({"min_p": asked.min_p} if asked.min_p else {}),
            "ignore_eos": True,
        }

    def read(self, asked: Asked, exchange: Exchange) -> Reply:
        """Raises MalformedError."""
        reply = Reply(asked, exchange)
        for choice in _choices(_object(exchange), exchange):
            try:
                tokens = choice.get("token_ids")
                if tokens is None:
                    raise ValueError(
                        "it has no token_ids, though return_token_ids was asked for: nothing can be compared"
                    )
                logprobs = [_number(one) for one in choice["logprobs"]["token_logprobs"]]
                reply.choices.append(Choice(choice.get("index"), list(tokens), logprobs, choice.get("finish_reason")))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise MalformedError(f"a sample cannot be read: {type(error).__name__}: {error}", exchange) from None
        return reply

    def read_stream(self, asked: Asked, exchange: Exchange) -> Reply:
        raise MalformedError("streams of completions are not compared", exchange)


@dataclass(frozen=True)
class Served:
    """The server's description of itself, filled in from its checkpoint; None for values that neither has."""

    route: TokenRoute | Completions
    engine: str
    vocab_size: int | None
    context_tokens: int | None
    precision: str | None
    features: tuple[str, ...]
    version: str | None
    info: bool  # whether /nmoe/info is there, with its counts


async def look(client: Client) -> Served:
    """Finds the route that a server speaks. Raises UnansweredError for one that speaks none."""
    info: dict[str, Any] | None = None
    answer = await client.call("GET", "/nmoe/info")
    if answer.status == 200:
        info = answer.json()
    asked = Asked((1,), max_tokens=1, request_id="referee-look")
    probe = await client.call("POST", GENERATE, TokenRoute().body(asked))
    if probe.status == 200 or (probe.status in (400, 422) and info is not None):
        probe.json()
        about = info or {}
        version = about.get("weight_version")
        if info is None:
            answer = await client.call("GET", "/weight_info")
            version = answer.json().get("weight_version") if answer.status == 200 else None
        return Served(
            TokenRoute(),
            str(about.get("engine", "vLLM, or a server like it")),
            about.get("vocab_size"),
            about.get("context_tokens"),
            about.get("precision"),
            tuple(about.get("features", ())),
            None if version is None else str(version),
            info is not None and "stats" in info,
        )
    models = await client.call("GET", "/v1/models")
    try:
        model = str(models.json()["data"][0]["id"]) if models.status == 200 else ""
    except (KeyError, TypeError, IndexError):
        model = ""
    if not model:
        raise UnansweredError(
            f"it has neither the token route ({GENERATE}: status {probe.status}, {shown_bytes(probe.reply)}) nor /v1/models"
        )
    return Served(Completions(model), "a server of OpenAI's API", None, None, None, (), None, False)


def with_model(served: Served, vocab_size: int, context_tokens: int, precision: str) -> Served:
    """Returns a description of a server, filled in from the checkpoint."""
    return replace(
        served,
        vocab_size=served.vocab_size or vocab_size,
        context_tokens=served.context_tokens or context_tokens,
        precision=served.precision or precision,
    )


def _object(exchange: Exchange) -> dict[str, Any]:
    try:
        return exchange.json()
    except UnansweredError as error:
        raise MalformedError(str(error), exchange) from None


def _choices(body: dict[str, Any], exchange: Exchange) -> Sequence[dict[str, Any]]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise MalformedError(f"the reply has no list of choices: {shown_bytes(exchange.reply)}", exchange)
    return choices


def _id(value: Any) -> Any:
    return value.removeprefix(_PREFIX) if isinstance(value, str) else value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _array(text: str) -> Any:
    array = np.lib.format.read_array(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    if array.dtype.kind not in "iu":
        raise ValueError(f"routes of type {array.dtype}")
    return array.astype(np.int16)
