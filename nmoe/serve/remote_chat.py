"""Talks to a server of OpenAI's protocol, and reads its stream of events."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.text.calls.pieces import Piece
from nmoe.text.conversation import ChatMessage

if TYPE_CHECKING:
    import httpx2

_KEY = "OPENAI_API_KEY"
_CONNECT_S, _SILENCE_S = 10.0, 600.0
# A line of a stream holds one piece of an answer, and a page of HTML can be one line.
_LONGEST_LINE = 16 * 2**20
_SHOWN = 200


class ChatServerError(UserError):
    """A server that cannot be talked to, or not any longer."""


class ServerChat:
    """A model behind `/v1/chat/completions`. The key is in the variable OPENAI_API_KEY, if the server wants one."""

    def __init__(self, url: str, model: str | None, temperature: float, max_tokens: int, seed: int) -> None:
        """Asks the server for its models if none is named. Raises UserError for an address that is none, and as `answer` does."""
        import httpx2

        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url {url}: not an address of a server; write http://HOST:PORT")
        base = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        key = os.environ.get(_KEY)
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(_SILENCE_S, connect=_CONNECT_S),
            trust_env=not _is_loopback(parts.hostname),
        )
        self._settings = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        self.model = self._first_model() if model is None else model

    def close(self) -> None:
        self._client.close()

    def answer(self, messages: Sequence[ChatMessage], turn: int) -> Iterator[Piece | str]:
        """Yields the pieces of the next message while they come, then the reason why it ended. Raises ChatServerError
        with the cause if there is no server, if it refuses, and if it breaks off."""
        body = {
            "model": self.model,
            "messages": [_as_openai(message) for message in messages],
            "stream": True,
            **self._settings,
            "seed": int(self._settings["seed"]) + turn,
        }
        import httpx2

        try:
            with self._client.stream("POST", f"{self.url}/chat/completions", json=body) as reply:
                self._check(reply)
                yield from _pieces(_events(reply.iter_bytes(), self.url))
        except httpx2.HTTPError as error:
            raise self._lost(error) from None

    def _first_model(self) -> str:
        import httpx2

        try:
            with self._client.stream("GET", f"{self.url}/models") as reply:
                self._check(reply)
                listed = json_of(reply.read())
        except httpx2.HTTPError as error:
            raise self._lost(error) from None
        except ValueError as error:
            raise ChatServerError(
                f"{self.url}/models: not JSON: {error}; is this a server of OpenAI's protocol?"
            ) from None
        models = listed.get("data") if isinstance(listed, dict) else None
        first = models[0].get("id") if isinstance(models, list) and models and isinstance(models[0], dict) else None
        if not isinstance(first, str):
            raise ChatServerError(f"{self.url}/models names no model; name one by --model")
        return first

    def _check(self, reply: httpx2.Response) -> None:
        kind = reply.headers.get("content-type", "")
        if reply.status_code == 200 and "html" not in kind:
            return
        content = reply.read()
        if reply.status_code in (401, 403):
            state = "refuses the key in" if os.environ.get(_KEY) else "wants a key; put it into"
            raise ChatServerError(f"{self.url} {state} {_KEY} ({reply.status_code}: {_reason(content)})")
        if "html" in kind:
            raise ChatServerError(
                f"{self.url} answers with a page of HTML ({reply.status_code}), not in OpenAI's protocol; check the address"
            )
        raise ChatServerError(f"{self.url} answers {reply.status_code}: {_reason(content)}")

    def _lost(self, error: Exception) -> ChatServerError:
        import httpx2

        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return ChatServerError(f"no server answers at {self.url}: {error}")
        if isinstance(error, httpx2.TimeoutException):
            return ChatServerError(f"{self.url} has been silent for {_SILENCE_S:.0f} s")
        return ChatServerError(f"the connection to {self.url} broke off: {error or type(error).__name__}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(content: bytes) -> str:
    """Returns the message of an error in OpenAI's shape, else the beginning of the content."""
    try:
        found = json_of(content)
    except ValueError:
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return said if isinstance(said, str) else content[:_SHOWN].decode(errors="replace") or "no reason given"


def _as_openai(message: ChatMessage) -> dict[str, Any]:
    taken: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        taken["content"] = message.content or None
        taken["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
                },
            }
            for call in message.calls
        ]
    if message.call_id is not None:
        taken["tool_call_id"] = message.call_id
    return taken


def _events(parts: Iterable[bytes], url: str) -> Iterator[Mapping[str, Any]]:
    """Yields the objects of a stream of events. Raises ChatServerError for a stream that is none, or that ends before its end."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise ChatServerError(
                f"{url} sends a line of more than {_LONGEST_LINE} bytes, which is no stream of an answer"
            )
        for line in lines:
            line = line.strip()
            if not line.startswith(b"data:"):
                if line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                    raise ChatServerError(f"{url} sends no stream of events: {_reason(line)}")
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            try:
                event = json_of(data)
            except ValueError as error:
                raise ChatServerError(f"{url} sends a broken event: {error}") from None
            if not isinstance(event, dict):
                raise ChatServerError(f"{url} sends an event that is no object: {_reason(data)}")
            if "error" in event:
                raise ChatServerError(f"{url} breaks off: {_reason(data)}")
            yield event
    raise ChatServerError(f"{url} broke off before the end of the answer")


def _pieces(events: Iterable[Mapping[str, Any]]) -> Iterator[Piece | str]:
    """Yields the pieces in the events' first choice, then its finish reason. Fields of other types than OpenAI's are skipped."""
    numbers = dict[Any, int]()
    reason = "stop"
    for event in events:
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        delta = choice.get("delta")
        if isinstance(choice.get("finish_reason"), str):
            reason = choice["finish_reason"]
        if not isinstance(delta, dict):
            continue
        for key in ("reasoning_content", "reasoning"):
            if isinstance(text := delta.get(key), str) and text:
                yield Piece("reasoning", text)
                break
        if isinstance(text := delta.get("content"), str) and text:
            yield Piece("content", text)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue
            index = str(call.get("index", 0))
            if index not in numbers:
                numbers[index] = len(numbers)
                yield Piece("call", "", numbers[index], str(function.get("name") or ""))
            if isinstance(text := function.get("arguments"), str) and text:
                yield Piece("arguments", text, numbers[index])
    yield reason
