"""Samples of a prompt, and log-probabilities of its tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nmoe.engine.api import Delta, RawLogprob, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import shown
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.fields import Fields
from nmoe.serve.tinker.messages import LENGTH, STOP, message
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sample, Sampling

MOST_SAMPLES = 1024
_MOST_TOP = 128
# Of a position without log-probabilities, as the SDK knows it.
_NO_TOP = (0, -99999.0)


@dataclass(frozen=True)
class SampleRequest:
    """A request for samples. `stops` are strings, as bytes; `last` counts the tokens of the prompt to score, all but the first by
    default."""

    prompt_ids: tuple[int, ...]
    samples: int
    sampling: Sampling
    stops: tuple[bytes, ...] = ()
    prompt_logprobs: bool = False
    last: int | None = None
    top_of_prompt: int = 0
    top_of_samples: int = 0


def read_sample_request(fields: Fields, tokenizer: Tokenizer, context_tokens: int) -> SampleRequest:
    """Reads the body of `/asample`. Raises TinkerError."""
    prompt = _tokens(fields.table("prompt"))
    for unsupported in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
        if fields.raw(unsupported):
            raise TinkerError(f"{unsupported}: this server does not compute them")
    given = fields.table("sampling_params")
    room = context_tokens - len(prompt)
    limit = given.whole("max_tokens", None, least=1)
    if room < 1 or (limit or 1) > room:
        raise TinkerError(
            f"prompt of {len(prompt)} tokens and sampling_params.max_tokens = {limit}: exceed the context of {context_tokens}"
        )
    stop = given.raw("stop")
    ends, stops = _stops(stop, tokenizer)
    last = fields.whole("prompt_logprobs_last_n", None, least=1, most=max(1, len(prompt) - 1))
    seed = given.whole("seed", None, least=-(2**63))
    return SampleRequest(
        prompt,
        fields.whole("num_samples", 1, least=1, most=MOST_SAMPLES),
        Sampling(
            limit or room,
            temperature=given.number("temperature", 1.0),
            top_p=given.number("top_p", 1.0),
            top_k=max(0, given.whole("top_k", -1, least=-1)),
            stop_ids=ends,
            seed=secrets.randbits(31) if seed is None else seed % 2**31,
        ),
        stops,
        fields.flag("prompt_logprobs"),
        last,
        fields.whole("topk_prompt_logprobs", 0, most=_MOST_TOP),
        fields.whole("topk_sample_logprobs", 0, most=_MOST_TOP),
    )


def _tokens(prompt: Fields) -> tuple[int, ...]:
    tokens = list[int]()
    for index, chunk in enumerate(prompt.items("chunks")):
        where = f"prompt.chunks[{index}]"
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise TinkerError(f"{where} = {shown(chunk)}: is no encoded text, and the model reads text alone")
        ids = Fields(chunk, f"{where}.").items("tokens")
        if not all(type(one) is int and one >= 0 for one in ids):
            raise TinkerError(f"{where}.tokens: must be token ids")
        tokens += ids
    if not tokens:
        raise TinkerError("prompt: has no tokens")
    return tuple(tokens)


def _stops(stop: Any, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    """Returns the tokens and the strings that end a sample: beside those asked for the tokenizer's ends, unless the list is
    empty."""
    if stop is None:
        return tokenizer.end_ids, ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(
        (isinstance(one, str) and one) or (type(one) is int and one >= 0) for one in stops
    ):
        raise TinkerError(f"sampling_params.stop = {shown(stop)}: must be a string, strings, or token ids")
    ids = [one for one in stops if isinstance(one, int)]
    ends = tuple(dict.fromkeys([*tokenizer.end_ids, *ids])) if stops else ()
    try:
        return ends, tuple(one.encode() for one in stops if isinstance(one, str))
    except UnicodeEncodeError:
        raise TinkerError(f"sampling_params.stop = {shown(stop)}: holds half a character") from None


async def sample(
    engine: NativeEngine, tokenizer: Tokenizer, asked: SampleRequest, request_id: str, adapter: str | None
) -> bytes:
    """Returns the samples, and the log-probabilities of the prompt that were asked for, as a SampleResponse."""
    reply = message("SampleResponse")()
    if asked.prompt_logprobs or asked.top_of_prompt:
        await _score_prompt(engine, asked, adapter, reply)
    top = asked.top_of_samples or None
    request = Request(asked.prompt_ids, asked.samples, asked.sampling, request_id, top, adapter)
    if asked.stops or top:
        samples = await _Followed(engine, tokenizer, asked, request).samples()
    else:
        samples = [(one, ()) for one in await engine.generate(request)]
    for one, raw in samples:
        written = reply.sequences.add(
            stop_reason=LENGTH if one.finish_reason == "length" else STOP,
            tokens=np.asarray(one.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(one.logprobs, "<f4").tobytes(),
        )
        if top:
            _write_top(written.topk_sampled_logprobs, _tempered(one, raw, asked.sampling.temperature), top)
    serialized: bytes = reply.SerializeToString()
    return serialized


def _tempered(one: Sample, raw: Sequence[RawLogprob], temperature: float) -> list[tuple[tuple[int, float], ...]]:
    """Returns the likeliest tokens at each position of a sample, with log-probabilities of the distribution that it was sampled
    from, as its own tokens have them; at temperature 0 the model's own. Tokens that top_k or top_p has cut off have those that
    they would have had."""
    if temperature == 0:
        return [each.top for each in raw]
    # What lies between the two log-probabilities of the sampled token is the same for all tokens.
    return [
        tuple((token, (logprob - each.logprob) / temperature + sampled) for token, logprob in each.top)
        for sampled, each in zip(one.logprobs, raw, strict=True)
    ]


async def _score_prompt(engine: NativeEngine, asked: SampleRequest, adapter: str | None, reply: Any) -> None:
    tokens = len(asked.prompt_ids)
    first = 1 if asked.last is None else max(1, tokens - asked.last)
    logprobs = np.full(tokens, np.nan, "<f4")
    if asked.top_of_prompt:
        raw = await engine.likelihoods(asked.prompt_ids, asked.top_of_prompt, first, adapter)
        found = [each for each in raw if each is not None]
        logprobs[first:] = [each.logprob for each in found]
        rows = [(_NO_TOP,) * asked.top_of_prompt] * first + [each.top for each in found]
        _write_top(reply.topk_prompt_logprobs, rows, asked.top_of_prompt)
    elif tokens > 1:
        # As the trainer computes them, to the bit in exact numerics.
        logprobs[first:] = (await engine.score(asked.prompt_ids, adapter=adapter))[first - 1 :]
    if asked.prompt_logprobs:
        reply.prompt_logprobs = logprobs.tobytes()


def _write_top(written: Any, rows: Sequence[Sequence[tuple[int, float]]], k: int) -> None:
    padded = [[*row, *[_NO_TOP] * (k - len(row))] for row in rows]
    written.k, written.length = k, len(rows)
    written.token_ids = np.asarray([[one for one, _ in row] for row in padded], "<i4").tobytes()
    written.logprobs = np.asarray([[one for _, one in row] for row in padded], "<f4").tobytes()


class _Followed:
    """A request whose tokens are read as they come: each sample ends with the token that completes a stop string."""

    def __init__(self, engine: NativeEngine, tokenizer: Tokenizer, asked: SampleRequest, request: Request) -> None:
        self._engine, self._tokenizer, self._stops, self._request = engine, tokenizer, asked.stops, request
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._texts = [b""] * request.samples
        self._raw: list[list[RawLogprob]] = [[] for _ in range(request.samples)]
        self._tokens = [0] * request.samples
        self._stopped: list[int | None] = [None] * request.samples
        self._samples: list[Sample | None] = [None] * request.samples

    async def samples(self) -> list[tuple[Sample, Sequence[RawLogprob]]]:
        ended = self._engine.follow(self._request, self._take)
        try:
            await ended
        finally:
            if not ended.done():
                self._engine.abort(self._request.request_id)
        return [self._cut(index) for index in range(self._request.samples)]

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            index = delta.index
            if delta.sample is not None:
                self._samples[index] = delta.sample
            if delta.token_id is None or self._stopped[index] is not None:
                continue
            self._tokens[index] += 1
            if delta.raw is not None:
                self._raw[index].append(delta.raw)
            piece = self._tokenizer.bytes_of(delta.token_id)
            text = self._texts[index] + piece
            if any(stop in text for stop in self._stops):
                self._stopped[index] = self._tokens[index]
                if delta.finish_reason is None:
                    self._engine.abort(self._request.request_id, index)
            self._texts[index] = text[max(0, len(text) - self._longest + 1) :] if self._longest > 1 else b""

    def _cut(self, index: int) -> tuple[Sample, Sequence[RawLogprob]]:
        sample, tokens = self._samples[index], self._stopped[index]
        assert sample is not None, "the request has ended"
        if tokens is None:
            return sample, self._raw[index]
        cut = Sample(sample.token_ids[:tokens], sample.logprobs[:tokens], sample.versions[:tokens], "stop")
        return cut, self._raw[index][:tokens]
