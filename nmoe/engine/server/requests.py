"""Reads the body of a request, as `nmoe.engine.remote.wire` writes it.

A field that nmoe would have to ignore is refused, because samples of another distribution look like any others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from nmoe.engine.api import Request
from nmoe.errors import UserError, shown
from nmoe.types import Sampling

_TOP = ("request_id", "token_ids", "sampling_params", "stream", "cache_salt", "return_token_ids", "model")
# What else vLLM's clients send, and the values that ask for nothing but what nmoe does.
_FIXED: dict[str, tuple[Any, ...]] = {"ignore_eos": (True,), "detokenize": (False,), "logprobs": (0, 1)}
_SETTINGS = ("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_PARAMS = (*_SETTINGS, "min_p", *_PENALTIES, "logit_bias", *_FIXED)
_REQUIRED = object()
_MOST_DIGITS = 19  # of a token id of 63 bits


class UnknownModelError(UserError):
    """A request names a model that the server does not have."""


def decode_request(body: Any, adapters: Collection[str] = (), names: Collection[str] = ()) -> tuple[Request, bool]:
    """Returns the request of a body, and whether its tokens are to be streamed. A `model` that is one of the `adapters` is sampled
    from with it; the base has the `names`. Raises UserError for a body that is not of this form, and UnknownModelError for
    another model, because samples of the base look like an adapter's."""
    check_names(body, "the body", _TOP)
    given = body.get("sampling_params")
    check_names(given, "sampling_params", _PARAMS)
    for name, values in _FIXED.items():
        if given.get(name) not in (None, *values):
            raise UserError(f"{name} = {shown(given[name])}: this server samples with {name} = {values[0]} alone")
    temperature, top_p = (take(given, name, (int, float), 1.0) for name in ("temperature", "top_p"))
    top_k = take(given, "top_k", int, 0)
    min_p, presence, frequency = (take(given, name, (int, float), 0.0) for name in ("min_p", *_PENALTIES))
    sampling = Sampling(
        take(given, "max_tokens", int),
        temperature,
        top_p,
        0 if top_k == -1 else top_k,
        tuple(take_ids(given, "stop_token_ids", [])),
        take(given, "seed", int) % 2**64,
        min_p,
        presence,
        frequency,
        _bias(take(given, "logit_bias", dict, {})),
    )
    prompt_ids, samples = tuple(take_ids(body, "token_ids")), take(given, "n", int, 1)
    model = take(body, "model", str, "")
    if model and model not in (*names, *adapters):
        known = f"; there is {', '.join((*names, *adapters))}" if (*names, *adapters) else ": leave it out"
        raise UnknownModelError(f"model = {shown(model)}: does not exist{known}")
    adapter = model if model in adapters else None
    request = Request(prompt_ids, samples, sampling, take(body, "request_id", str), adapter=adapter)
    return request, take(body, "stream", bool, False)


def _bias(given: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < _MOST_DIGITS):
            raise UserError(f"logit_bias has the key {shown(token)}: keys are token ids as text, such as '17'")
    return tuple((int(token), take(given, token, (int, float))) for token in given)


def check_names(table: Any, what: str, known: Collection[str]) -> None:
    if not isinstance(table, dict):
        raise UserError(f"{what} = {shown(table)}: must be a JSON object")
    if unknown := sorted(table.keys() - set(known)):
        raise UserError(
            f"{what} has {', '.join(unknown)}, which this server does not know; it takes {', '.join(known)}"
        )


def take(table: dict[str, Any], name: str, kind: Any, default: Any = _REQUIRED) -> Any:
    """Returns a value of a table, or its default where it is missing or null. Raises UserError for another type."""
    value = table.get(name)
    if value is None:
        value = default
    if value is _REQUIRED or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(f"{name} = {shown(table.get(name))}: must be {wanted}")
    try:
        return float(value) if kind == (int, float) else value
    except OverflowError:
        raise UserError(f"{name} = {shown(value)}: is too large") from None


def take_ids(table: dict[str, Any], name: str, default: Any = _REQUIRED) -> list[int]:
    ids: list[int] = take(table, name, list, default)
    if not all(type(one) is int for one in ids):
        raise UserError(f"{name} = {shown(ids)}: must be a list of token ids")
    return ids
