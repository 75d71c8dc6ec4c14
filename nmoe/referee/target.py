"""What a server is asked for samples by, and its replies, read without trust: the token route of nmoe and vLLM, SGLang's, or
OpenAI's completions with log-probabilities."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nmoe.engine.remote.sglang import GENERATE as SGLANG
from nmoe.engine.remote.wire import GENERATE, TORN, decode_array
from nmoe.model.config import ModelConfig
from nmoe.parsing import json_of
from nmoe.referee.client import Client, Exchange, UnansweredError, shown_bytes

_PREFIX = "generate-tokens-"  # of request ids in vLLM's replies
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Asked:
    """A request for samples. `salt` keeps prefixes of requests with another one apart; `until` are strings that end a text."""

    prompt: tuple[int, ...]
    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[int, ...] = ()
    until: tuple[str, ...] = ()
    seed: int = 0
    salt: str | None = None
    request_id: str = ""
    stream: bool = False


@dataclass
class Choice:
    """One sample as the server gave it. `spans` are (version, start, end); `kept` the ids that each token was drawn from; `text` is
    None from a route of tokens alone."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    spans: list[tuple[str, int, int]] | None = None
    kept: list[list[int]] | None = None
    routes: Any = None
    text: str | None = None

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
                tokens, kept = _ids(choice["token_ids"]), choice.get("sampling_mask")
                for token, one in zip(tokens, content, strict=False):
                    name = one["token_id"] if "token_id" in one else one.get("token", token)
                    if name not in (token, f"token_id:{token}"):
                        raise ValueError(f"token {token} has the log-probability of {name!r}")
                reply.choices.append(
                    Choice(
                        _whole(choice["index"]),
                        tokens,
                        [_number(one["logprob"]) for one in content],
                        _finish(choice),
                        _spans(choice.get("weight_versions"), len(tokens)),
                        None if kept is None else [_ids(one) for one in kept],
                        None if choice.get("routed_experts") is None else decode_array(choice["routed_experts"]),
                    )
                )
            except TORN as error:
                raise MalformedError(f"a sample cannot be read: {type(error).__name__}: {error}", exchange) from None
        return reply

    def read_stream(self, asked: Asked, exchange: Exchange) -> Reply:
        """Joins the events of a stream. Raises MalformedError."""
        return _joined(asked, exchange, lambda logprobs: [one["logprob"] for one in logprobs.get("content") or []])


class SGLang:
    """`POST /generate` of SGLang, with a batch instead of n. No SGLang was judged by it, only its fake in the tests."""

    name, path, raw = "SGLang's route", SGLANG, False

    def __init__(self, routers: tuple[int, int] | None = None) -> None:
        """`routers` is the number of layers with experts and of those that a token takes; without it no routes are asked for."""
        self._routers = routers

    def body(self, asked: Asked) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k or -1,
            "min_p": asked.min_p,
            "stop_token_ids": list(asked.stop),
            "ignore_eos": True,
            "no_stop_trim": True,
        }
        seeds = [(asked.seed * 1_000_003 + index) % 2**31 for index in range(asked.n)]
        return {
            "rid": [f"{asked.request_id}/{index}" for index in range(asked.n)],
            "input_ids": [list(asked.prompt)] * asked.n,
            "sampling_params": [sampling | {"sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
            "return_sampling_mask": bool(asked.top_p < 1 or asked.top_k or asked.min_p),
            "return_routed_experts": self._routers is not None,
            "extra_key": asked.salt,
            "stream": False,
        }

    def read(self, asked: Asked, exchange: Exchange) -> Reply:
        """Raises MalformedError."""
        reply = Reply(asked, exchange)
        try:
            for answer in json_of(exchange.reply):
                meta, tokens = answer["meta_info"], _ids(answer["output_ids"])
                reply.named, _, index = str(meta["id"]).rpartition("/")
                content, kept = meta["output_token_logprobs"], meta.get("output_token_sampling_mask")
                if [one[1] for one in content] != tokens:
                    raise ValueError("its log-probabilities are of other tokens")
                # Of a truncated distribution the first are of all tokens, and the others of the kept ones.
                values = [one[0] for one in content] if kept is None else meta["output_token_sampling_logprobs"]
                reply.choices.append(
                    Choice(
                        int(index),
                        tokens,
                        list(map(_number, values)),
                        _finish({"finish_reason": meta["finish_reason"]["type"]}),
                        _spans(meta.get("weight_versions"), len(tokens)),
                        None if kept is None else [_ids(one) for one in kept],
                        self._routes(meta.get("routed_experts"), len(asked.prompt) + len(tokens) - 1),
                    )
                )
        except (*TORN, IndexError) as error:
            raise MalformedError(f"a sample cannot be read: {type(error).__name__}: {error}", exchange) from None
        return reply

    def _routes(self, text: str | None, tokens: int) -> Any:
        if text is None or self._routers is None:
            return None
        routes = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
        return routes.reshape(tokens, *self._routers).astype(np.int16)

    def read_stream(self, asked: Asked, exchange: Exchange) -> Reply:
        raise MalformedError("streams of SGLang are not compared", exchange)


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
            # These are no fields of OpenAI's own server; vLLM, SGLang and nmoe have them.
            **({"stop_token_ids": list(asked.stop)} if asked.stop else {}),
            **({"stop": list(asked.until)} if asked.until else {}),
            "ignore_eos": True,
        }

    def read(self, asked: Asked, exchange: Exchange) -> Reply:
        """Raises MalformedError."""
        reply = Reply(asked, exchange)
        for choice in _choices(_object(exchange), exchange):
            try:
                reply.prompt = choice.get("prompt_token_ids", reply.prompt)
                tokens = choice.get("token_ids")
                if tokens is None:
                    raise ValueError(
                        "it has no token_ids, though return_token_ids was asked for: nothing can be compared"
                    )
                logprobs = [_number(one) for one in choice["logprobs"]["token_logprobs"]]
                text = choice.get("text")
                if not isinstance(text, str | None):
                    raise ValueError(f"its text is {text!r}")
                reply.choices.append(
                    Choice(_whole(choice["index"]), _ids(tokens), logprobs, _finish(choice), text=text)
                )
            except TORN as error:
                raise MalformedError(f"a sample cannot be read: {type(error).__name__}: {error}", exchange) from None
        return reply

    def read_stream(self, asked: Asked, exchange: Exchange) -> Reply:
        """Joins the events of a stream. Raises MalformedError."""
        return _joined(asked, exchange, lambda logprobs: logprobs.get("token_logprobs") or [])


@dataclass(frozen=True)
class Served:
    """The server's description of itself, filled in from its checkpoint; None for values that neither has."""

    route: TokenRoute | SGLang | Completions
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
            version = (await client.call("GET", "/weight_info")).value("weight_version")
        features, precision = about.get("features"), about.get("precision")
        return Served(
            TokenRoute(),
            str(about.get("engine", "vLLM, or a server like it")),
            _size(about.get("vocab_size")),
            _size(about.get("context_tokens")),
            precision if isinstance(precision, str) else None,
            tuple(map(str, features)) if isinstance(features, list) else (),
            None if version is None else str(version),
            "stats" in about,
        )
    about_sglang = (await client.call("GET", "/model_info")).value("weight_version")
    if about_sglang is not None:
        return Served(SGLang(), "SGLang", None, None, None, (), str(about_sglang), False)
    models = await client.call("GET", "/v1/models")
    try:
        model = str(models.value("data")[0]["id"])
    except (KeyError, TypeError, IndexError):
        model = ""
    if not model:
        raise UnansweredError(
            f"it has neither the token route ({GENERATE}: status {probe.status}, {shown_bytes(probe.reply)}) nor /v1/models"
        )
    return Served(Completions(model), "a server of OpenAI's API", None, None, None, (), None, False)


def with_model(served: Served, config: ModelConfig, precision: str) -> Served:
    """Returns a description of a server, filled in from the checkpoint."""
    of_experts = isinstance(served.route, SGLang) and config.moe_layers
    return replace(
        served,
        route=SGLang((len(config.moe_layers), config.experts_per_token)) if of_experts else served.route,
        vocab_size=served.vocab_size or config.vocab_size,
        context_tokens=served.context_tokens or config.context_tokens,
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


def _joined(asked: Asked, exchange: Exchange, logprobs_of: Callable[[Any], Sequence[Any]]) -> Reply:
    """Joins the events of a stream. Raises MalformedError."""
    merged: dict[int, Choice] = {}
    named, ended = None, False
    for line in exchange.reply.decode("utf-8", "replace").splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not data:
            continue
        if data == "[DONE]":
            ended = True
            continue
        try:
            body = json_of(data)
            named = _id(body.get("request_id")) or named
            for choice in body["choices"]:
                index = _whole(choice["index"])
                into = merged.setdefault(index, Choice(index, [], [], None))
                into.tokens += _ids(choice.get("token_ids") or [])
                into.logprobs += map(_number, logprobs_of(choice.get("logprobs") or {}))
                into.finish = _finish(choice) or into.finish
        except TORN as error:
            raise MalformedError(f"an event of the stream cannot be read: {error}: {data[:120]}", exchange) from None
    if not ended:
        raise MalformedError("the stream does not end with [DONE]", exchange)
    return Reply(asked, exchange, [merged[index] for index in sorted(merged)], named)


def _id(value: Any) -> Any:
    return value.removeprefix(_PREFIX) if isinstance(value, str) else value


def _number(value: Any) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError as error:
        raise ValueError(str(error)) from None


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _size(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _ids(values: Any) -> list[int]:
    return [_whole(value) for value in values]


def _finish(choice: dict[str, Any]) -> str | None:
    reason = choice.get("finish_reason")
    if not isinstance(reason, str | None):
        raise ValueError(f"its finish reason is {reason!r}")
    return reason


def _spans(spans: Any, count: int) -> list[tuple[str, int, int]] | None:
    if spans is None:
        return None
    read = [(str(one["version"]), _whole(one["start"]), _whole(one["end"])) for one in spans]
    for version, start, end in read:
        if not 0 <= start <= end <= count:
            raise ValueError(f"it has the version {version} for the tokens {start} to {end} of {count}")
    return read
