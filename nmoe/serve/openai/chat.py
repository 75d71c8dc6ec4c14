"""`POST /v1/chat/completions`: what a request asks for, its whole reply, and its chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from nmoe.engine.api import Request
from nmoe.serve.openai.fields import Fields
from nmoe.serve.openai.logprobs import chat_entries, dumps, usage
from nmoe.serve.openai.messages import read_messages, read_tools
from nmoe.serve.openai.model import Served
from nmoe.serve.openai.reading import Addition, Choice, TextReader, merged, texts, tool_calls
from nmoe.serve.openai.runs import Run
from nmoe.serve.openai.settings import Asked
from nmoe.serve.openai.stops import Stops
from nmoe.types import Message


class ChatJob:
    """A chat request that can run: its prompt, and how its choices are read and written."""

    def __init__(self, served: Served, asked: Asked, prompt_ids: Sequence[int], readers: Sequence[Any]) -> None:
        self.asked, self._names = asked, served.names
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._served = served
        choices = [
            Choice(index, reader, Stops(asked.stops, asked.with_stop) if asked.stops else None, asked.sampling.stop_ids)
            for index, reader in enumerate(readers)
        ]
        sampling = served.with_ends(asked, served.renderer.stop_ids)
        self.runs = [Run(Request(tuple(prompt_ids), asked.samples, sampling, self._id), choices)]
        self._call_ids: dict[tuple[int, int], str] = {}
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": asked.model}
        self._head = dumps(head | {"system_fingerprint": served.fingerprint})[:-1]
        self._tail = ',"usage":null}\n\n' if asked.with_usage else "}\n\n"

    def opening(self) -> bytes:
        extra = f',"prompt_token_ids":{dumps(self.runs[0].request.prompt_ids)}' if self.asked.with_ids else ""
        first = '{"role":"assistant","content":""}'
        return "".join(
            self._event(choice.index, first, "null", extra=extra if choice.index == 0 else "")
            for choice in self.runs[0].choices
        ).encode()

    def chunks(self, additions: Sequence[Addition]) -> bytes:
        parts = list[str]()
        for added in additions:
            logprobs, ids = self._logprobs(added), self._ids(added)
            for piece in merged(added.pieces):
                parts.append(self._event(added.index, self._delta(added.index, piece), logprobs, of_choice=ids))
                logprobs, ids = "null", ""
            if logprobs != "null" or ids:
                parts.append(self._event(added.index, "{}", logprobs, of_choice=ids))
            if added.finish is not None:
                reason = f',"stop_reason":{dumps(added.reason)}'
                parts.append(self._event(added.index, "{}", "null", f'"{added.finish}"', of_choice=reason))
        return "".join(parts).encode()

    def closing(self) -> bytes:
        if not self.asked.with_usage:
            return b""
        return f'data: {self._head},"choices":[],"usage":{dumps(self._usage())}}}\n\n'.encode()

    def whole(self, additions: Sequence[Addition]) -> dict[str, Any]:
        choices = [
            self._whole_choice(index, [one for one in additions if one.index == index])
            for index in range(self.asked.samples)
        ]
        reply: dict[str, Any] = {"id": self._id, "object": "chat.completion", "created": self._created}
        reply |= {"model": self.asked.model, "system_fingerprint": self._served.fingerprint}
        if self.asked.with_ids:
            reply["prompt_token_ids"] = list(self.runs[0].request.prompt_ids)
        return reply | {"choices": choices, "usage": self._usage()}

    def _whole_choice(self, index: int, additions: Sequence[Addition]) -> dict[str, Any]:
        pieces = [piece for added in additions for piece in added.pieces]
        deltas = [delta for added in additions for delta in added.deltas]
        content, reasoning = texts(pieces, "content"), texts(pieces, "reasoning")
        calls = tool_calls(pieces, [self._call_id(index, call) for call in range(len(pieces))])
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message |= {"refusal": None} | ({"reasoning_content": reasoning} if reasoning else {})
        if calls:
            message["tool_calls"] = calls
        whole = Addition(index, deltas=deltas)
        logprobs = self._logprobs(whole)
        choice = {"index": index, "message": message, "logprobs": json.loads(logprobs)}
        choice |= {"finish_reason": additions[-1].finish, "stop_reason": additions[-1].reason}
        return choice | ({"token_ids": [delta.token_id for delta in deltas]} if self.asked.with_ids else {})

    def _usage(self) -> dict[str, int]:
        (run,) = self.runs
        return usage(run.prompt_tokens, run.tokens)

    def _event(
        self, index: int, delta: str, logprobs: str, finish: str = "null", of_choice: str = "", extra: str = ""
    ) -> str:
        return (
            f'data: {self._head},"choices":[{{"index":{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{of_choice}}}]{extra}{self._tail}'
        )

    def _delta(self, index: int, piece: Any) -> str:
        if piece.kind == "content":
            return f'{{"content":{json.dumps(piece.text)}}}'
        if piece.kind == "reasoning":
            return f'{{"reasoning_content":{json.dumps(piece.text)}}}'
        if piece.kind == "arguments":
            return f'{{"tool_calls":[{{"index":{piece.call},"function":{{"arguments":{json.dumps(piece.text)}}}}}]}}'
        call = {"index": piece.call, "id": self._call_id(index, piece.call), "type": "function"}
        return dumps({"tool_calls": [call | {"function": {"name": piece.name, "arguments": ""}}]})

    def _call_id(self, index: int, call: int) -> str:
        return self._call_ids.setdefault((index, call), f"call_{secrets.token_hex(12)}")

    def _ids(self, added: Addition) -> str:
        if not (self.asked.with_ids and added.deltas):
            return ""
        return f',"token_ids":{dumps([delta.token_id for delta in added.deltas])}'

    def _logprobs(self, added: Addition) -> str:
        if self.asked.top is None or not added.deltas:
            return "null"
        tokens = [(delta.token_id, delta.raw) for delta in added.deltas if delta.token_id is not None]
        entries = chat_entries(self._names, tokens, self.asked.with_ids, self.asked.ids_as_tokens)
        return f'{{"content":{entries},"refusal":null}}'


def read_chat(served: Served, fields: Fields) -> ChatJob:
    """Reads the fields of a request. Raises ApiError for one that is wrong."""
    fields.zero_is_unset("max_tokens")
    fields.zero_is_unset("max_completion_tokens")
    older = fields.integer("max_tokens", None, 1)
    asked = served.settings(fields, fields.integer("max_completion_tokens", None, 1) or older, None)
    messages, _ = read_messages(fields), read_tools(fields)
    fields.finish()
    said = [Message(one.role, one.content, channel="final" if one.role == "assistant" else None) for one in messages]
    prompt_ids = served.renderer.prompt_ids(said)
    asked = served.with_room(asked, len(prompt_ids), None, "messages")
    readers = [TextReader(served.names, served.renderer.stop_ids) for _ in range(asked.samples)]
    return ChatJob(served, asked, prompt_ids, readers)
