"""A chat request that runs: its whole reply, and its chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from nmoe.engine.api import Request
from nmoe.serve.openai.logprobs import chat_entries, dumps, listed, quoted, usage
from nmoe.serve.openai.model import Served
from nmoe.serve.openai.reading import Addition, Choice, merged, texts, tool_calls
from nmoe.serve.openai.runs import Run
from nmoe.serve.openai.settings import Asked
from nmoe.serve.openai.stops import Stops
from nmoe.text.turns import Piece, TurnReader


class ChatJob:
    """A chat request that can run: its prompt, and how its choices are read and written.

    `begun` are the last tokens of the prompt, with which the assistant's turn begins; with `echo` the reply has their text, too.
    """

    def __init__(
        self,
        served: Served,
        asked: Asked,
        prompt_ids: Sequence[int],
        mismatch: int | None,
        readers: Sequence[TurnReader],
        begun: Sequence[int],
        echo: bool,
        with_reasoning: bool,
        with_experts: bool,
    ) -> None:
        self.asked, self._served, self._mismatch = asked, served, mismatch
        self._with_reasoning, self._with_experts = with_reasoning, with_experts
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._echoed: list[Piece] = []
        choices = []
        for index, reader in enumerate(readers):
            pieces = reader.feed(begun) if begun else []
            self._echoed = pieces if echo else []
            stops = Stops(asked.stops, asked.with_stop) if asked.stops else None
            choices.append(Choice(index, reader, stops, asked.sampling.stop_ids, pieces, announced=echo))
        sampling = served.with_ends(asked, served.format.stop_ids)
        request = Request(tuple(prompt_ids), asked.samples, sampling, self._id, asked.top, served.adapter(asked.model))
        self.runs = [Run(request, choices)]
        self._call_ids: dict[tuple[int, int], str] = {}
        about = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": asked.model}
        self._about: dict[str, Any] = about | {"system_fingerprint": served.fingerprint}
        self._head = dumps(self._about)[:-1]
        self._tail = ',"usage":null}\n\n' if asked.with_usage else "}\n\n"

    async def prepare(self) -> None:
        """Nothing has to be computed before the first token."""

    def unsampled(self) -> list[Addition]:
        return []

    def opening(self) -> bytes:
        extra = "".join(f',"{name}":{dumps(value)}' for name, value in self._of_prompt().items())
        parts = list[str]()
        for choice in self.runs[0].choices:
            parts.append(self._event(choice.index, '{"role":"assistant","content":""}', "null", extra=extra))
            parts += self._events(Addition(choice.index, self._echoed))
            extra = ""
        return "".join(parts).encode()

    def chunks(self, additions: Sequence[Addition]) -> bytes:
        return "".join([event for added in additions for event in self._events(added)]).encode()

    def _events(self, added: Addition) -> list[str]:
        events = list[str]()
        logprobs, ids = self._logprobs(added), self._ids(added)
        for piece in merged(added.pieces):
            if piece.kind == "reasoning" and not self._with_reasoning:
                continue
            events.append(self._event(added.index, self._delta(added.index, piece), logprobs, of_choice=ids))
            logprobs, ids = "null", ""
        if ids or logprobs != "null":
            events.append(self._event(added.index, "{}", logprobs, of_choice=ids))
        if added.finish is not None:
            ended = {"stop_reason": added.reason} | self._experts(added)
            of_choice = "".join(f',"{name}":{dumps(value)}' for name, value in ended.items())
            events.append(self._event(added.index, "{}", "null", f'"{added.finish}"', of_choice))
        return events

    def closing(self) -> bytes:
        if not self.asked.with_usage:
            return b""
        return f'data: {self._head},"choices":[],"usage":{dumps(self.usage())}}}\n\n'.encode()

    def whole(self, additions: Sequence[Addition]) -> dict[str, Any]:
        by_index: list[list[Addition]] = [[] for _ in range(self.asked.samples)]
        for added in additions:
            by_index[added.index].append(added)
        choices = [self._choice(index, of_it) for index, of_it in enumerate(by_index)]
        about = self._about | {"object": "chat.completion"} | self._of_prompt()
        return about | {"choices": choices, "usage": self.usage()}

    def _choice(self, index: int, additions: Sequence[Addition]) -> dict[str, Any]:
        pieces = [*self._echoed, *(piece for added in additions for piece in added.pieces)]
        whole = Addition(index, token_ids=[one for added in additions for one in added.token_ids])
        whole.raws = [raw for added in additions for raw in added.raws]
        content, reasoning = texts(pieces, "content"), texts(pieces, "reasoning")
        calls = tool_calls(pieces, lambda call: self._call_id(index, call))
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message["refusal"] = None
        if reasoning and self._with_reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = self._logprobs(whole)
        choice: dict[str, Any] = {"index": index, "message": message, "logprobs": json.loads(logprobs)}
        choice |= {"finish_reason": additions[-1].finish, "stop_reason": additions[-1].reason}
        if self.asked.with_ids:
            choice["token_ids"] = whole.token_ids
        return choice | self._experts(additions[-1])

    def usage(self) -> dict[str, int]:
        (run,) = self.runs
        return usage(len(run.request.prompt_ids), run.tokens)

    def _of_prompt(self) -> dict[str, Any]:
        """Returns what a reply says of its prompt."""
        about: dict[str, Any] = {}
        if self.asked.with_ids:
            about["prompt_token_ids"] = self.runs[0].request.prompt_ids
        if self._mismatch is not None:
            about["retoken_mismatch"] = self._mismatch
        return about

    def _experts(self, last: Addition) -> dict[str, Any]:
        """Returns the experts of each sampled token. The last token was never fed, so that it has none."""
        if not self._with_experts or last.sample is None:
            return {}
        start, count = len(self.runs[0].request.prompt_ids), self.runs[0].choices[last.index].tokens
        assert last.sample.routes is not None, "a mixture of experts records them"
        routes = last.sample.routes[start : start + count - 1].tolist()
        return {"experts": [*routes, None], "expert_count": self._served.experts}

    def _event(
        self, index: int, delta: str, logprobs: str, finish: str = "null", of_choice: str = "", extra: str = ""
    ) -> str:
        return (
            f'data: {self._head},"choices":[{{"index":{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{of_choice}}}]{extra}{self._tail}'
        )

    def _delta(self, index: int, piece: Piece) -> str:
        if piece.kind == "content":
            return f'{{"content":{quoted(piece.text)}}}'
        if piece.kind == "reasoning":
            return f'{{"reasoning_content":{quoted(piece.text)}}}'
        assert piece.call is not None, "the other kinds belong to a call"
        if piece.kind == "arguments":
            return dumps({"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]})
        call = {"index": piece.call, "id": self._call_id(index, piece.call), "type": "function"}
        return dumps({"tool_calls": [call | {"function": {"name": piece.name, "arguments": ""}}]})

    def _call_id(self, index: int, call: int) -> str:
        return self._call_ids.setdefault((index, call), f"call_{secrets.token_hex(12)}")

    def _ids(self, added: Addition) -> str:
        return f',"token_ids":{listed(added.token_ids)}' if self.asked.with_ids and added.token_ids else ""

    def _logprobs(self, added: Addition) -> str:
        if self.asked.top is None or not added.token_ids:
            return "null"
        tokens = zip(added.token_ids, added.raws, strict=True)
        entries = chat_entries(self._served.names, tokens, self.asked.with_ids, self.asked.ids_as_tokens)
        return f'{{"content":{entries},"refusal":null}}'
