"""A checkpoint that is served: its engine, tokenizer and format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from nmoe.engine.native.engine import NativeEngine
from nmoe.serve.openai.limits import Limits
from nmoe.serve.openai.names import TokenNames
from nmoe.serve.openai.settings import Asked, Defaults, read_settings
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import ChatFormat
from nmoe.types import Sampling
from nmoe.web.openai.errors import ApiError
from nmoe.web.openai.fields import Fields


@dataclass(frozen=True)
class Served:
    """What the routes serve. `models` are the names by which clients may ask for it, the first of them by default."""

    engine: NativeEngine
    tokenizer: Tokenizer
    format: ChatFormat
    models: tuple[str, ...]
    context_tokens: int
    vocab_size: int
    layers: int
    experts: int  # 0 without a mixture
    fingerprint: str
    adapters: tuple[str, ...] = ()  # the names of those over this base
    strict: bool = False
    limits: Limits = field(default_factory=Limits)
    defaults: Defaults = field(default_factory=Defaults)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def names(self) -> TokenNames:
        return TokenNames(self.tokenizer)

    def settings(self, fields: Fields, most_tokens: int | None, top: int | None) -> Asked:
        """Reads the fields that chat and completions share; see `read_settings`."""
        asked = read_settings(fields, self.limits, self.defaults, most_tokens, top)
        for token_id, _ in asked.sampling.logit_bias:
            self._check_id(token_id, f"logit_bias.{token_id}")
        for token_id in asked.sampling.stop_ids:
            self._check_id(token_id, "stop_token_ids")
        return replace(asked, model=self.named(asked.model))

    def with_ends(self, asked: Asked, ends: Sequence[int]) -> Sampling:
        """Returns the settings of the sampler, which stops at the request's tokens and at the format's `ends`."""
        own = () if asked.ignore_eos else ends
        return replace(asked.sampling, stop_ids=tuple(dict.fromkeys([*own, *asked.sampling.stop_ids])))

    def named(self, model: str) -> str:
        """Returns the name of the model that a request asks for. Raises ApiError (404) for another."""
        if not model and not self.strict:
            return self.models[0]
        if model not in (*self.models, *self.adapters):
            known = ", ".join((*self.models, *self.adapters))
            raise ApiError(f"model {model!r} does not exist; there is {known}", "model", "model_not_found", 404)
        return model

    def adapter(self, model: str) -> str | None:
        """Returns the adapter that a name stands for; None for the base."""
        return model if model in self.adapters else None

    def vocabulary(self, fields: Fields, name: str) -> list[int] | None:
        """Takes a field with tokens of the model. Raises ApiError for an id beyond them."""
        token_ids = fields.ids(name)
        if token_ids:
            self._check_id(max(token_ids), name)
        return token_ids

    def _check_id(self, token_id: int, param: str) -> None:
        if token_id >= self.vocab_size:
            raise ApiError(f"{param} has {token_id}: token ids lie in 0..{self.vocab_size - 1}", param, "invalid_value")

    def check_room(self, prompt_tokens: int, wanted: int, param: str) -> None:
        """Raises ApiError if a prompt and the tokens to sample exceed the context, or the prompt the limit of prompts."""
        most = self.limits.prompt_tokens or self.context_tokens
        if prompt_tokens > most:
            raise ApiError(f"the prompt has {prompt_tokens} tokens: at most {most}", param, "context_length_exceeded")
        if prompt_tokens + wanted > self.context_tokens:
            raise ApiError(
                f"the context of {self.context_tokens} tokens has no room for a prompt of {prompt_tokens} tokens and {wanted} more",
                param,
                "context_length_exceeded",
            )
