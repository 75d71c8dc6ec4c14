"""`POST /v1/completions`: what a request asks for, its whole reply, and its chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from nmoe.engine.api import Request
from nmoe.serve.openai.errors import ApiError
from nmoe.serve.openai.fields import Fields
from nmoe.serve.openai.logprobs import dumps, usage
from nmoe.serve.openai.model import Served
from nmoe.serve.openai.reading import Addition, Choice, TextReader, texts
from nmoe.serve.openai.runs import Run
from nmoe.serve.openai.settings import Asked
from nmoe.serve.openai.stops import Stops

_DEFAULT_TOKENS = 16


class TextJob:
    """A request for completions that can run. Choice `n * p + s` is sample `s` of prompt `p`."""

    def __init__(self, served: Served, asked: Asked, prompts: Sequence[Sequence[int]], echo: bool) -> None:
        self.asked, self._served, self._echo = asked, served, echo
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        silent = frozenset(served.tokenizer.control_ids) | frozenset(served.tokenizer.end_ids)
        self.runs = []
        for number, prompt in enumerate(prompts):
            choices = [
                Choice(
                    number * asked.samples + sample,
                    TextReader(served.names, silent),
                    Stops(asked.stops, asked.with_stop) if asked.stops else None,
                    asked.sampling.stop_ids,
                )
                for sample in range(asked.samples)
            ]
            sampling = served.with_ends(asked, served.tokenizer.end_ids)
            self.runs.append(Run(Request(tuple(prompt), asked.samples, sampling, f"{self._id}/{number}"), choices))
        self._texts = [served.tokenizer.decode(prompt) for prompt in prompts] if echo else []
        head = {"id": self._id, "object": "text_completion", "created": self._created, "model": asked.model}
        self._about: dict[str, Any] = head | {"system_fingerprint": served.fingerprint}
        self._head = dumps(self._about)[:-1]
        self._tail = ',"usage":null}\n\n' if asked.with_usage else "}\n\n"

    def opening(self) -> bytes:
        return "".join(
            self._event(choice.index, text)
            for run, text in zip(self.runs, self._texts, strict=False)
            for choice in run.choices
        ).encode()

    def chunks(self, additions: Sequence[Addition]) -> bytes:
        parts = list[str]()
        for added in additions:
            if text := texts(added.pieces, "content"):
                parts.append(self._event(added.index, text))
            if added.finish is not None:
                reason = f',"stop_reason":{dumps(added.reason)}'
                parts.append(self._event(added.index, "", f'"{added.finish}"', reason))
        return "".join(parts).encode()

    def closing(self) -> bytes:
        if not self.asked.with_usage:
            return b""
        return f'data: {self._head},"choices":[],"usage":{dumps(self._usage())}}}\n\n'.encode()

    def whole(self, additions: Sequence[Addition]) -> dict[str, Any]:
        count = self.asked.samples * len(self.runs)
        by_index: list[list[Addition]] = [[] for _ in range(count)]
        for added in additions:
            by_index[added.index].append(added)
        choices = [self._whole_choice(index, of_it) for index, of_it in enumerate(by_index)]
        return self._about | {"choices": choices, "usage": self._usage()}

    def _whole_choice(self, index: int, additions: Sequence[Addition]) -> dict[str, Any]:
        text = self._texts[index // self.asked.samples] if self._echo else ""
        text += texts([piece for added in additions for piece in added.pieces], "content")
        choice = {"index": index, "text": text, "logprobs": None}
        return choice | {"finish_reason": additions[-1].finish, "stop_reason": additions[-1].reason}

    def _usage(self) -> dict[str, int]:
        return usage(sum(run.prompt_tokens for run in self.runs), sum(run.tokens for run in self.runs))

    def _event(self, index: int, text: str, finish: str = "null", of_choice: str = "") -> str:
        return (
            f'data: {self._head},"choices":[{{"index":{index},"text":{dumps(text)},"logprobs":null,'
            f'"finish_reason":{finish}{of_choice}}}]{self._tail}'
        )


def read_completions(served: Served, fields: Fields) -> TextJob:
    """Reads the fields of a request. Raises ApiError for one that is wrong."""
    if fields.any("logprobs") is not None:
        raise ApiError("logprobs: is not served yet", "logprobs")
    fields.zero_is_unset("max_tokens")
    fields.zero_is_unset("best_of")
    asked = served.settings(fields, fields.integer("max_tokens", None, 1), None)
    echo = fields.boolean("echo")
    prompts = _prompts(fields, served)
    fields.finish()
    longest = max(map(len, prompts))
    asked = served.with_room(asked, longest, _DEFAULT_TOKENS, "prompt")
    return TextJob(served, asked, prompts, echo)


def _prompts(fields: Fields, served: Served) -> list[list[int]]:
    """Reads `prompt`: a text, a list of texts, a list of token ids, or a list of such lists."""
    given = fields.any("prompt")
    if given is None:
        raise ApiError("prompt: is missing", "prompt")
    several = given if isinstance(given, list) and not _are_ids(given) else [given]
    if not several:
        raise ApiError("prompt: has nothing in it", "prompt")
    if len(several) > served.limits.prompts:
        raise ApiError(f"prompt has {len(several)} prompts: at most {served.limits.prompts}", "prompt")
    opening = list(served.tokenizer.opening_ids) if fields.boolean("add_special_tokens", True) else []
    prompts = list[list[int]]()
    for one in several:
        if isinstance(one, str):
            prompts.append(opening + served.tokenizer.encode(one))
        elif isinstance(one, list) and _are_ids(one):
            prompts.append(one)
        else:
            fields.refuse("prompt", one, "must be a text, a list of texts, token ids, or a list of lists of them")
    for prompt in prompts:
        if not prompt:
            raise ApiError("prompt: has no tokens", "prompt")
        if not max(prompt) < served.vocab_size:
            fields.refuse("prompt", max(prompt), f"token ids lie in 0..{served.vocab_size - 1}")
    return prompts


def _are_ids(given: list[Any]) -> bool:
    return bool(given) and all(type(one) is int and one >= 0 for one in given)
