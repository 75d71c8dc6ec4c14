"""`POST /v1/completions`: what a request asks for, its whole reply, and its chunks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nmoe.engine.api import RawLogprob, Request
from nmoe.serve.openai.logprobs import Scored, TextLogprobs, dumps, joined, listed, quoted, usage
from nmoe.serve.openai.model import Served
from nmoe.serve.openai.reading import Addition, Choice, TextReader, texts
from nmoe.serve.openai.runs import Run
from nmoe.serve.openai.settings import MOST_TOP, Asked
from nmoe.serve.openai.stops import Stops
from nmoe.web.openai.errors import ApiError
from nmoe.web.openai.fields import Fields

_DEFAULT_TOKENS = 16
_MOST_OF = 20


@dataclass(frozen=True)
class Prompt:
    """A prompt: its tokens, the first `opening` of which the tokenizer puts before every text, and its text."""

    token_ids: tuple[int, ...]
    opening: int
    text: str


class TextJob:
    """A request for completions that can run. Choice `p * n + s` is sample `s` of prompt `p`.

    Of each prompt's samples the `best` likeliest are returned.
    """

    def __init__(
        self, served: Served, asked: Asked, prompts: Sequence[Prompt], echo: bool, best: int, special: bool
    ) -> None:
        self.asked, self._served, self._prompts, self._echo, self._best = asked, served, prompts, echo, best
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        ends = frozenset(served.tokenizer.end_ids)
        self._silent = ends if special else ends | served.tokenizer.control_ids
        self._likelihoods: Sequence[Sequence[RawLogprob | None]] = []
        self._tables = [
            TextLogprobs(served.names, self._silent, asked.ids_as_tokens) for _ in range(asked.samples * len(prompts))
        ]
        self.runs = self._runs() if asked.sampling.max_new_tokens else []
        about = {"id": self._id, "object": "text_completion", "created": self._created, "model": asked.model}
        self._about: dict[str, Any] = about | {"system_fingerprint": served.fingerprint}
        self._head = dumps(self._about)[:-1]

    def _runs(self) -> list[Run]:
        asked = self.asked
        sampling = self._served.with_ends(asked, self._served.tokenizer.end_ids)
        top = 0 if asked.top is None and asked.samples > self._best else asked.top
        adapter = self._served.adapter(asked.model)
        runs = []
        for number, prompt in enumerate(self._prompts):
            choices = [
                Choice(
                    number * asked.samples + sample,
                    TextReader(self._served.names, self._silent),
                    Stops(asked.stops, asked.with_stop) if asked.stops else None,
                    asked.sampling.stop_ids,
                )
                for sample in range(asked.samples)
            ]
            request_id = f"{self._id}/{number}"
            request = Request(prompt.token_ids, asked.samples, sampling, request_id, top, adapter)
            runs.append(Run(request, choices))
        return runs

    async def prepare(self) -> None:
        """Scores the prompts, if their log-probabilities are asked for."""
        if self._echo and self.asked.top is not None:
            engine, adapter = self._served.engine, self._served.adapter(self.asked.model)
            scored = (engine.likelihoods(one.token_ids, self.asked.top, adapter=adapter) for one in self._prompts)
            self._likelihoods = await asyncio.gather(*scored)

    def unsampled(self) -> list[Addition]:
        """Returns the ends of the choices of a request that samples nothing."""
        return [Addition(index, finish="length") for index in range(self.asked.samples * len(self._prompts))]

    def opening(self) -> bytes:
        first = ""
        if self.asked.with_ids and len(self._prompts) == 1:
            first = f',"prompt_token_ids":{dumps(self._prompts[0].token_ids)}'
        if not (self._echo or first):
            return b""
        parts = []
        for index in range(self.asked.samples * len(self._prompts)):
            text = self._prompts[index // self.asked.samples].text if self._echo else ""
            table = self._prompt_table(index)
            parts.append(self._event(index, text, "null" if table is None else dumps(table), of_choice=first))
        return "".join(parts).encode()

    def chunks(self, additions: Sequence[Addition]) -> bytes:
        parts = list[str]()
        for added in additions:
            text, table = texts(added.pieces, "content"), "null"
            if self.asked.top is not None and added.token_ids:
                table = dumps(self._tables[added.index].sampled(_scored(added)))
            ids = f',"token_ids":{listed(added.token_ids)}' if self.asked.with_ids and added.token_ids else ""
            if text or ids or table != "null":
                parts.append(self._event(added.index, text, table, of_choice=ids))
            if added.finish is not None:
                reason = f',"stop_reason":{dumps(added.reason)}'
                parts.append(self._event(added.index, "", "null", f'"{added.finish}"', reason))
        return "".join(parts).encode()

    def closing(self) -> bytes:
        if not self.asked.with_usage:
            return b""
        return f'data: {self._head},"choices":[],"usage":{dumps(self.usage())}}}\n\n'.encode()

    def whole(self, additions: Sequence[Addition]) -> dict[str, Any]:
        by_index: list[list[Addition]] = [[] for _ in range(self.asked.samples * len(self._prompts))]
        for added in additions:
            by_index[added.index].append(added)
        choices = [self._whole_choice(index, by_index[index]) for index in self._kept(by_index)]
        numbered = [choice | {"index": index} for index, choice in enumerate(choices)]
        return self._about | {"choices": numbered, "usage": self.usage()}

    def _kept(self, by_index: Sequence[Sequence[Addition]]) -> list[int]:
        """Returns the choices that are returned: of each prompt's samples the likeliest per token."""
        samples = self.asked.samples
        if self._best == samples:
            return list(range(len(by_index)))

        def likelihood(index: int) -> float:
            logprobs = [raw.logprob for added in by_index[index] for raw in added.raws]
            return sum(logprobs) / max(1, len(logprobs))

        return [
            index
            for start in range(0, len(by_index), samples)
            for index in sorted(range(start, start + samples), key=likelihood, reverse=True)[: self._best]
        ]

    def _whole_choice(self, index: int, additions: Sequence[Addition]) -> dict[str, Any]:
        prompt = self._prompts[index // self.asked.samples]
        text = prompt.text if self._echo else ""
        text += texts([piece for added in additions for piece in added.pieces], "content")
        logprobs = None
        if self.asked.top is not None:
            scored = [one for added in additions for one in _scored(added)]
            parts = [self._prompt_table(index), self._tables[index].sampled(scored)]
            logprobs = joined([part for part in parts if part is not None])
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs}
        choice |= {"finish_reason": additions[-1].finish, "stop_reason": additions[-1].reason}
        if self.asked.with_ids:
            choice["prompt_token_ids"] = prompt.token_ids
            choice["token_ids"] = [token for added in additions for token in added.token_ids]
        return choice

    def _prompt_table(self, index: int) -> dict[str, Any] | None:
        if not self._likelihoods:
            return None
        number = index // self.asked.samples
        prompt = self._prompts[number]
        scored = list(zip(prompt.token_ids, self._likelihoods[number], strict=True))
        return self._tables[index].prompt(scored, prompt.opening, prompt.text)

    def usage(self) -> dict[str, int]:
        return usage(sum(len(one.token_ids) for one in self._prompts), sum(run.tokens for run in self.runs))

    def _event(self, index: int, text: str, logprobs: str, finish: str = "null", of_choice: str = "") -> str:
        return (
            f'data: {self._head},"choices":[{{"index":{index},"text":{quoted(text)},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{of_choice}}}]}}\n\n'
        )


def _scored(added: Addition) -> list[Scored]:
    return list(zip(added.token_ids, added.raws, strict=True))


def read_completions(served: Served, fields: Fields) -> TextJob:
    """Reads the fields of a request. Raises ApiError for one that is wrong."""
    echo = fields.boolean("echo")
    if not echo:
        fields.zero_is_unset("max_tokens")
    fields.zero_is_unset("best_of")
    most = fields.integer("max_tokens", _DEFAULT_TOKENS, 0 if echo else 1)
    top = fields.integer("logprobs", None, 0, MOST_TOP)
    asked = served.settings(fields, most, top)
    best = asked.samples
    samples = fields.integer("best_of", best, 1, max(_MOST_OF, best))
    if samples < best or (samples > best and asked.streamed):
        fields.refuse("best_of", samples, f"must be at least n = {best}, and no more than n with stream = true")
    special = not fields.boolean("skip_special_tokens", True)
    prompts = _prompts(fields, served)
    fields.finish()
    served.check_room(max(len(one.token_ids) for one in prompts), most, "prompt")
    return TextJob(served, replace(asked, samples=samples), prompts, echo, best, special)


def _prompts(fields: Fields, served: Served) -> list[Prompt]:
    """Reads `prompt`: a text, a list of texts, a list of token ids, or a list of such lists."""
    given = fields.any("prompt")
    several = given if isinstance(given, list) and not _are_ids(given) else [given]
    if not several:
        raise ApiError("prompt: has nothing in it", "prompt")
    if len(several) > served.limits.prompts:
        raise ApiError(f"prompt has {len(several)} prompts: at most {served.limits.prompts}", "prompt")
    with_opening = fields.boolean("add_special_tokens", True)
    prompts = list[Prompt]()
    for one in several:
        if isinstance(one, str):
            token_ids, opening = encoded(served, one, with_opening)
            prompts.append(Prompt(tuple(token_ids), opening, one))
        elif isinstance(one, list) and _are_ids(one):
            prompts.append(Prompt(tuple(one), 0, served.names.text(one)))
        else:
            fields.refuse("prompt", one, "must be a text, a list of texts, token ids, or a list of lists of them")
    for prompt in prompts:
        if not prompt.token_ids:
            raise ApiError("prompt: has no tokens", "prompt")
        if max(prompt.token_ids) >= served.vocab_size:
            fields.refuse("prompt", max(prompt.token_ids), f"token ids lie in 0..{served.vocab_size - 1}")
    return prompts


def encoded(served: Served, text: str, with_opening: bool) -> tuple[list[int], int]:
    """Encodes a prompt that the client has written as a whole, in which names of control tokens are these tokens; returns how many
    tokens the tokenizer puts before it, too."""
    opening = list(served.tokenizer.opening_ids) if with_opening else []
    token_ids = served.tokenizer.encode(text, control_tokens=True)
    if opening and token_ids[: len(opening)] == opening:
        opening = []
    return opening + token_ids, len(opening)


def _are_ids(given: list[Any]) -> bool:
    return bool(given) and all(type(one) is int and 0 <= one < 2**31 for one in given)
