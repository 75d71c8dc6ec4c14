"""The routes by which programs ask the policy, as OpenAI's clients call them: `/SESSION/v1/chat/completions` and `/models`, or
without `/SESSION` by a client that names its session in a header.

The run sets the sampler. A request may only ask for fewer tokens; its other settings change nothing, and the reply's header names
them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asking
from starlette.responses import Response
from starlette.routing import Route

from nmoe.engine.server.http import body_of, json_reply, unless_gone
from nmoe.errors import UserError
from nmoe.rollout.programs import Session, SessionEndedError
from nmoe.text.calls.pieces import Piece
from nmoe.web.openai.errors import ApiError
from nmoe.web.openai.fields import IGNORED, Fields
from nmoe.web.openai.messages import read_messages, read_tools

# Bytes of a request.
_MOST_BYTES = 16 * 2**20
_OF_THE_RUN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
    "top_logprobs", "reasoning_effort", "response_format",
)  # fmt: skip


def application(sessions: Mapping[str, Session]) -> Starlette:
    """Returns the ASGI application that answers for these sessions."""

    def name_of(asking: Asking) -> str:
        return asking.path_params.get("session") or asking.headers.get("x-session-id", "")

    def session_of(asking: Asking) -> Session:
        session = sessions.get(name_of(asking))
        if session is None:
            raise ApiError("there is no such session; its program has ended", status=404)
        return session

    async def models(asking: Asking) -> Response:
        session_of(asking)
        return json_reply({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "nmoe"}]})

    async def chat(asking: Asking) -> Response:
        session = session_of(asking)
        with session.of_the_run(ApiError, ClientDisconnect, UserError):  # a bug here is no failure of the program
            return await _answered(session, asking)

    async def refused(asking: Asking, error: Exception) -> Response:
        if isinstance(error, ApiError):
            return error.reply()
        if isinstance(error, SessionEndedError):
            # Clients try again after other statuses. By its name an environment's host knows this refusal from other servers'.
            said = f"{error}; session {name_of(asking)} has ended"
            return ApiError(said, code=error.failure, status=403).reply()
        if isinstance(error, ClientDisconnect):
            return ApiError("the client is gone", status=499).reply()
        return ApiError(str(error)).reply()

    return Starlette(
        routes=[
            *(Route(f"{session}/v1/models", models, methods=["GET"]) for session in ("", "/{session}")),
            *(Route(f"{session}/v1/chat/completions", chat, methods=["POST"]) for session in ("", "/{session}")),
        ],
        exception_handlers=dict.fromkeys((ApiError, ClientDisconnect, SessionEndedError, UserError), refused),
    )


async def _answered(session: Session, asking: Asking) -> Response:
    fields = Fields(await body_of(asking, _MOST_BYTES))
    messages, tools = read_messages(fields), read_tools(fields)
    streamed, model = fields.boolean("stream"), fields.text("model", "policy")
    options = fields.table("stream_options")
    most = fields.integer("max_completion_tokens", None, 1) or fields.integer("max_tokens", None, 1)
    fields.ignore("max_tokens")
    if fields.integer("n", 1, 1) != 1:
        fields.refuse("n", "more", "a session samples one turn at a time")
    for name in _OF_THE_RUN:
        fields.ignore(name)
    fields.finish()
    pieces, sample, prompt_tokens = await unless_gone(asking, session.turn(messages, tools, most))
    message = _message(pieces)
    finish = "length" if sample.finish_reason == "length" else "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(sample.token_ids)}
    usage["total_tokens"] = sum(usage.values())
    about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
    headers = {IGNORED: ", ".join(fields.ignored)} if fields.ignored else {}
    if not streamed:
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return json_reply(about | {"object": "chat.completion", "choices": [choice], "usage": usage}, headers=headers)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    about["object"] = "chat.completion.chunk"
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
    ]
    if options is not None and options.boolean("include_usage"):
        chunks.append({"choices": [], "usage": usage})
    body = "".join(f"data: {json.dumps(about | chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return Response(body, 200, headers, "text/event-stream")


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    def text(kind: str, call: int | None = None) -> str:
        return "".join(one.text for one in pieces if one.kind == kind and one.call == call)

    message: dict[str, Any] = {"role": "assistant", "content": text("content")}
    if reasoning := text("reasoning"):
        message["reasoning_content"] = reasoning
    calls = [one for one in pieces if one.kind == "call"]
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": one.name, "arguments": text("arguments", one.call)},
            }
            for one in calls
        ]
    return message
