"""Requests and samples as JSON. `nmoe.engine.server.requests` reads the requests.

vLLM's token route has this form, `POST /inference/v1/generate`, so that one client drives nmoe's engine server and vLLM.
Python writes a float as the shortest text that reads as the same float, so that log-probabilities arrive bit for bit.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, get_args

import numpy as np

from nmoe.engine.api import Delta, Request
from nmoe.errors import InfrastructureError, cut, shown
from nmoe.parsing import json_of
from nmoe.types import FinishReason, Sample

GENERATE = "/inference/v1/generate"

WEIGHTS_ID = "x-nmoe-weights"
"""The header of every reply of nmoe's server: another value is another process, or later weights of the same one."""

_PREFIX = "generate-tokens-"  # of request ids in vLLM's replies
_RARE = ("min_p", "presence_penalty", "frequency_penalty")  # sent where they are set, or vLLM would cut without need
_NO_LOGPROB = -9999.0  # vLLM sends it for NaN
UNPUBLISHED = -1
"""The version of weights that a vLLM has loaded by itself, which it calls "default" or not at all."""
TORN = (ValueError, TypeError, KeyError, AttributeError)
"""The exceptions of reading a value that is not of the expected form."""


class WireError(InfrastructureError):
    """A server refused a request, or its reply is torn or does not answer the request. `status` is HTTP's: 200 for such a reply."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


def encode_request(request: Request, stream: bool = False) -> dict[str, Any]:
    """Returns the body of a request. Of the seed the last 64 bits count; they are sent as a signed number, as vLLM takes it."""
    settings = request.sampling
    rare = {name: value for name in _RARE if (value := getattr(settings, name))}
    if settings.logit_bias:
        rare["logit_bias"] = {str(token): value for token, value in settings.logit_bias}
    return {
        "request_id": request.request_id,
        "token_ids": list(request.prompt_ids),
        "sampling_params": {
            "n": request.samples,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "seed": (settings.seed + 2**63) % 2**64 - 2**63,
            "stop_token_ids": list(settings.stop_ids),
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
            **rare,
        },
        "stream": stream,
        "return_token_ids": True,
        **({} if request.adapter is None else {"model": request.adapter}),
    }


def encode_samples(request: Request, samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the body of the reply to a request."""
    return {
        "request_id": request.request_id,
        "prompt_token_ids": list(request.prompt_ids),
        "choices": [_encode_sample(index, sample) for index, sample in enumerate(samples)],
    }


def _encode_sample(index: int, sample: Sample) -> dict[str, Any]:
    spans, start = [], 0
    for version, group in groupby(sample.versions):
        stop = start + len(list(group))
        spans.append({"version": str(version), "start": start, "end": stop})
        start = stop
    return {
        "index": index,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "logprobs": _encode_logprobs(sample.token_ids, sample.logprobs),
        "weight_versions": spans,
        "routed_experts": None if sample.routes is None else _encode_array(sample.routes),
        "sampling_mask": sample.kept_ids,
    }


def decode_samples(status: int, body: bytes, request: Request) -> list[Sample]:
    """Returns the samples in the reply to a request, in order of their index. Raises WireError for a refusal, for a reply that is
    torn, and for one that does not answer this request. The values of a sample are for `nmoe.engine.checked` to judge."""
    if status != 200:
        raise WireError(f"request {request.request_id} was refused with status {status}: {error_of(body)}", status)
    try:
        reply = json_of(body)
        answered = reply["request_id"].removeprefix(_PREFIX)
        _expect(answered == request.request_id, f"it answers request {shown(answered)}")
        if (prompt := reply.get("prompt_token_ids")) is not None:
            _expect(prompt == list(request.prompt_ids), "it answers another prompt")
        samples = {choice["index"]: decode_choice(choice) for choice in reply["choices"]}
        indices = sorted(choice["index"] for choice in reply["choices"])
        _expect(indices == list(range(request.samples)), f"it has the samples {indices} of {request.samples}")
    except TORN as error:
        raise WireError(f"the reply to request {request.request_id} cannot be used: {_reason(error)}") from None
    return [samples[index] for index in range(request.samples)]


def decode_choice(choice: dict[str, Any]) -> Sample:
    """Returns the sample that a reply has as one of its choices. Raises one of `TORN` for a choice that is torn."""
    tokens, logprobs = _decode_logprobs(choice)
    spans = choice["weight_versions"]
    versions = [UNPUBLISHED] * len(tokens) if spans is None else []
    for span in spans or []:
        version, start, end = span["version"], span["start"], span["end"]
        _expect(start == len(versions) < end <= len(tokens), f"it has versions for the tokens {start} to {end}")
        _expect(version.isdecimal() or version == "default", f"its version {shown(version)} is not a whole number")
        versions += [UNPUBLISHED if version == "default" else int(version)] * (end - start)
    _expect(len(versions) == len(tokens), f"it has {len(tokens)} tokens and {len(versions)} versions")
    reason, routes = choice["finish_reason"], choice.get("routed_experts")
    _expect(reason in get_args(FinishReason), f"its finish reason is {shown(reason)}")
    array = None if routes is None else decode_array(routes)
    return Sample(tokens, logprobs, versions, reason, choice.get("sampling_mask"), array)


def encode_deltas(request: Request, deltas: Sequence[Delta]) -> bytes:
    """Returns tokens of a stream as a server-sent event, with one choice for each sample that has any."""
    of_sample: dict[int, list[Delta]] = {}
    for delta in deltas:
        of_sample.setdefault(delta.index, []).append(delta)
    choices = []
    for index, its in of_sample.items():
        token_ids = [delta.token_id for delta in its if delta.token_id is not None]
        logprobs = [delta.logprob for delta in its if delta.token_id is not None]
        choices.append(
            {
                "index": index,
                "token_ids": token_ids,
                "finish_reason": its[-1].finish_reason,
                "logprobs": _encode_logprobs(token_ids, logprobs),
            }
        )
    return event({"request_id": request.request_id, "choices": choices})


def event(body: dict[str, Any] | None) -> bytes:
    """Returns a server-sent event; None ends a stream."""
    return b"data: " + (b"[DONE]" if body is None else json.dumps(body).encode()) + b"\n\n"


def decode_deltas(line: str, request: Request) -> list[Delta]:
    """Returns the tokens in one line of a stream, without `raw` and `sample`, which are not sent; a line between events and the
    last one have none. Raises WireError for a line that is torn, and for an error that the server met after the stream had
    begun."""
    data = line.removeprefix("data:").strip()
    if not data or data == "[DONE]":
        return []
    try:
        body = json_of(data)
        _expect("error" not in body, error_of(data))
        deltas: list[Delta] = []
        for choice in body["choices"]:
            tokens, logprobs = _decode_logprobs(choice)
            reason, index = choice["finish_reason"], choice["index"]
            _expect(reason in (None, *get_args(FinishReason)), f"its finish reason is {shown(reason)}")
            _expect(type(index) is int and 0 <= index < request.samples, f"it has the sample {shown(index)}")
            pairs = zip(tokens, logprobs, strict=True)
            its = [Delta(token, logprob, None, index) for token, logprob in pairs]
            if reason is not None and reason != "abort":
                _expect(bool(its), f"a sample ends by {reason} without a token")
                its[-1] = replace(its[-1], finish_reason=reason)
            elif reason is not None:
                its.append(Delta(None, 0.0, reason, index))
            deltas += its
    except TORN as error:
        raise WireError(f"the stream of request {request.request_id} broke off: {_reason(error)}") from None
    return deltas


def error_body(status: int, message: str) -> dict[str, Any]:
    """Returns the body of a refusal."""
    return {"error": {"message": message, "code": status}}


def error_of(body: bytes | str) -> str:
    """Returns the message in the body of a refusal, or the start of a body that has none."""
    try:
        error = json_of(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError):
        return cut(body if isinstance(body, str) else body.decode("utf-8", "replace"), 200)


def _encode_logprobs(token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    pairs = zip(token_ids, logprobs, strict=True)
    return {"content": [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]}


def _decode_logprobs(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Returns the token ids of a choice and their log-probabilities. Each log-probability repeats its token's id, under the key
    `token_id` or `token` (vLLM has used both). Raises ValueError if that is another id than the choice's, or their numbers
    differ."""
    tokens, content = choice["token_ids"], (choice["logprobs"] or {}).get("content") or []
    named = [one["token_id"] if "token_id" in one else one["token"] for one in content]
    _expect(len(named) == len(tokens), f"it has {len(tokens)} tokens and {len(named)} log-probabilities")
    for token, name in zip(tokens, named, strict=True):
        _expect(type(token) is int and name in (token, f"token_id:{token}"), f"token {token!r} is named {name!r}")
    logprobs = [one["logprob"] for one in content]
    _expect(_NO_LOGPROB not in logprobs, f"it says {_NO_LOGPROB} for a log-probability that is no number")
    return tokens, logprobs


def _encode_array(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode_array(text: str) -> Any:
    """Returns an array of experts. Raises ValueError for a text that is none."""
    try:
        # Not np.load, which opens archives too.
        array = np.lib.format.read_array(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except Exception as error:  # NumPy reads the header as Python, and raises what Python's tokenizer raises
        raise ValueError(f"its routes are torn: {error}") from None
    _expect(array.dtype.kind in "iu", f"its experts are numbers of type {array.dtype}")
    _expect(not array.size or 0 <= array.min() <= array.max() < 2**15, "its experts have numbers beyond 15 bits")
    return array.astype(np.int16)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _reason(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
