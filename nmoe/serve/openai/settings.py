"""What a request asks of the sampler, read from the fields that chat and completions share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from nmoe.errors import shown
from nmoe.serve.openai.limits import Limits
from nmoe.types import Sampling
from nmoe.web.openai.errors import ApiError
from nmoe.web.openai.fields import Fields

MOST_TOP = 20
"""The most alternatives of a token whose log-probabilities are returned."""


@dataclass(frozen=True)
class Defaults:
    """Sampling settings of requests that leave them out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Asked:
    """What a request asks for besides its prompt. `sampling` has the limit that the request names, or 0 if it names none.

    `top` is the number of alternatives of each token, None without log-probabilities.
    """

    model: str
    samples: int
    sampling: Sampling
    ignore_eos: bool
    stops: tuple[str, ...]
    with_stop: bool
    top: int | None
    streamed: bool
    with_usage: bool
    with_ids: bool
    ids_as_tokens: bool
    seconds: float


def read_settings(
    fields: Fields, limits: Limits, defaults: Defaults, most_tokens: int | None, top: int | None
) -> Asked:
    """Reads the fields of sampling and streaming. `most_tokens` and `top` are read by the route, because their names differ."""
    options = fields.table("stream_options")
    streamed = fields.boolean("stream")
    with_usage = False
    if options is not None:
        if fields.strict and not streamed:
            fields.refuse("stream_options", {}, "is for stream = true alone")
        with_usage = options.boolean("include_usage")
        options.ignore("include_obfuscation")
        options.finish()
        fields.ignored += options.ignored
    seed = fields.integer("seed", None, -(2**63), 2**64 - 1)
    sampling = Sampling(
        most_tokens or 0,
        fields.number("temperature", defaults.temperature, 0, 2),
        # The smallest share that keeps one token keeps the most likely one.
        fields.number("top_p", defaults.top_p, 0, 1) or 1e-9,
        max(0, fields.integer("top_k", defaults.top_k, -1, 2**31)),
        tuple(fields.ids("stop_token_ids") or ()),
        secrets.randbits(63) if seed is None else seed % 2**64,
        min_p=fields.number("min_p", 0.0, 0, 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=_logit_bias(fields),
    )
    return Asked(
        model=fields.text("model", ""),
        samples=fields.integer("n", 1, 1, limits.samples),
        sampling=sampling,
        ignore_eos=fields.boolean("ignore_eos"),
        stops=_stops(fields, limits.stops),
        with_stop=fields.boolean("include_stop_str_in_output"),
        top=top,
        streamed=streamed,
        with_usage=with_usage and streamed,
        with_ids=fields.boolean("return_token_ids"),
        ids_as_tokens=fields.boolean("return_tokens_as_token_ids"),
        seconds=limits.request_s,
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Reads `logit_bias`. A bias of 0 changes nothing, so that it may stand at any name unless the server is strict."""
    table = fields.take("logit_bias", dict, {})
    biases = list[tuple[int, float]]()
    for name, value in table.items():
        if value == 0 and value is not False and not fields.strict:
            continue
        path = fields.path(f"logit_bias.{name}")
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise ApiError(f"logit_bias has {shown(name)}: must be the id of a token, as text", path, "invalid_value")
        if not isinstance(value, int | float) or isinstance(value, bool) or not -100 <= value <= 100:
            raise ApiError(f"{path} = {shown(value)}: must be a number from -100 to 100", path, "invalid_value")
        biases.append((int(name), float(value)))
    return tuple(biases)


def _stops(fields: Fields, most: int) -> tuple[str, ...]:
    given = fields.any("stop", [])
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        fields.refuse("stop", given, "must be a text or a list of texts, none of them empty")
    if len(stops) > most:
        raise ApiError(f"stop has {len(stops)} texts: at most {most}", "stop")
    return tuple(stops)
