"""A checkpoint that is served: its engine, tokenizer and format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from nmoe.engine.native.engine import NativeEngine
from nmoe.serve.openai.errors import ApiError
from nmoe.serve.openai.fields import Fields
from nmoe.serve.openai.limits import Limits
from nmoe.serve.openai.names import TokenNames
from nmoe.serve.openai.settings import Asked, Defaults, read_settings
from nmoe.text.renderers import Renderer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sampling


@dataclass(frozen=True)
class Served:
    """What the routes serve. `models` are the names by which clients may ask for it, the first of them by default."""

    engine: NativeEngine
    tokenizer: Tokenizer
    renderer: Renderer
    models: tuple[str, ...]
    context_tokens: int
    vocab_size: int
    fingerprint: str
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
        return replace(asked, model=self.named(asked.model))

    def with_ends(self, asked: Asked, ends: Sequence[int]) -> Sampling:
        """Returns the settings of the sampler, which stops at the request's tokens and at the format's `ends`."""
        own = () if asked.ignore_eos else ends
        return replace(asked.sampling, stop_ids=tuple(dict.fromkeys([*own, *asked.sampling.stop_ids])))

    def named(self, model: str) -> str:
        """Returns the name of the model that a request asks for. Raises ApiError (404) for another."""
        if not model and not self.strict:
            return self.models[0]
        if model not in self.models:
            known = ", ".join(self.models)
            raise ApiError(f"model {model!r} does not exist; there is {known}", "model", "model_not_found", 404)
        return model

    def with_room(self, asked: Asked, prompt_tokens: int, default: int | None, param: str) -> Asked:
        """Returns what a request asks for with the tokens that it samples at most: its own limit, else the default or what the
        context leaves. Raises ApiError if prompt and tokens exceed the context or the limit of prompts."""
        most = self.limits.prompt_tokens or self.context_tokens
        if prompt_tokens > most:
            raise ApiError(f"the prompt has {prompt_tokens} tokens: at most {most}", param, "context_length_exceeded")
        left = self.context_tokens - prompt_tokens
        wanted = asked.sampling.max_new_tokens or min(default or left, left)
        if not 1 <= wanted <= left:
            raise ApiError(
                f"the context of {self.context_tokens} tokens has no room for a prompt of {prompt_tokens} tokens and "
                f"{max(wanted, 1)} more",
                param,
                "context_length_exceeded",
            )
        return replace(asked, sampling=replace(asked.sampling, max_new_tokens=wanted))
