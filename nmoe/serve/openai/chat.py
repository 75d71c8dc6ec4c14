"""`POST /v1/chat/completions`: reads what a request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from nmoe.errors import UserError, shown
from nmoe.serve.openai.chat_job import ChatJob
from nmoe.serve.openai.model import Served
from nmoe.serve.openai.settings import MOST_TOP
from nmoe.text.conversation import ToolDefinition
from nmoe.text.renderers import ReasoningEffort
from nmoe.web.openai.errors import ApiError
from nmoe.web.openai.fields import Fields
from nmoe.web.openai.messages import read_messages, read_tools

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat. `mismatch` is the first position at which the tokens that the client gave differ from the rendered
    messages; the given ones count."""

    token_ids: list[int]
    tools: Sequence[ToolDefinition]
    mismatch: int | None


def read_prompt(served: Served, fields: Fields) -> ChatPrompt:
    """Reads messages, tools and the settings of the template, and renders them."""
    messages, tools = read_messages(fields), read_tools(fields)
    arguments = fields.take("chat_template_kwargs", dict, {})
    effort, arguments = _effort(served, fields, arguments)
    given = served.vocabulary(fields, "prompt_token_ids")
    try:
        rendered = served.format.prompt_ids(messages, tools, effort, arguments)
    except UserError as error:
        raise ApiError(str(error), "messages") from None
    if given is None or given == rendered:
        return ChatPrompt(rendered, tools, None)
    pairs = zip(given, rendered, strict=False)
    mismatch = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(given), len(rendered)))
    if served.strict:
        raise ApiError(
            f"prompt_token_ids differ from the rendered messages at position {mismatch}",
            "prompt_token_ids",
            "retoken_mismatch",
        )
    if not given:
        raise ApiError("prompt_token_ids: has no tokens", "prompt_token_ids")
    return ChatPrompt(given, tools, mismatch)


def _effort(served: Served, fields: Fields, arguments: dict[str, Any]) -> tuple[ReasoningEffort | None, dict[str, Any]]:
    """Reads the effort for the format, and the arguments of its template, of which one turns reasoning off (`none`). An effort that
    the format does not have changes nothing."""
    effort, template = fields.choice("reasoning_effort", _EFFORTS), served.tokenizer.chat_template or ""
    by_template = served.format.name not in ("harmony", "text")
    if effort in get_args(ReasoningEffort):
        known = "reasoning_effort" in template if by_template else served.format.name == "harmony"
        if known:
            return effort, arguments
    elif effort == "none" and by_template and "enable_thinking" in template:
        return None, {"enable_thinking": False} | arguments
    if effort is None or (effort == "none" and not served.format.has_reasoning):
        return None, arguments
    if fields.strict:
        fields.refuse("reasoning_effort", effort, "this model's format has no such effort")
    fields.ignored.append("reasoning_effort")
    return None, arguments


def read_chat(served: Served, fields: Fields) -> ChatJob:
    """Reads the fields of a request. Raises ApiError for one that is wrong."""
    fields.zero_is_unset("max_tokens")
    fields.zero_is_unset("max_completion_tokens")
    older = fields.integer("max_tokens", None, 1)
    most = fields.integer("max_completion_tokens", None, 1) or older
    with_logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", None, 0, MOST_TOP)
    if top and not with_logprobs:
        fields.refuse("top_logprobs", top, "needs logprobs = true")
    asked = served.settings(fields, most, (top or 0) if with_logprobs else None)
    only(fields, "response_format", {"type": "text"})
    only(fields, "skip_special_tokens", True)
    only(fields, "add_generation_prompt", True)
    with_reasoning, with_experts = fields.boolean("include_reasoning", True), fields.boolean("return_experts")
    if with_experts and not served.experts:
        fields.refuse("return_experts", True, "the model has no experts")
    echo, begun = fields.boolean("echo"), served.vocabulary(fields, "continue_token_ids") or []
    prompt = read_prompt(served, fields)
    fields.finish()
    token_ids = [*prompt.token_ids, *begun]
    left = served.context_tokens - len(token_ids)
    served.check_room(len(token_ids), most or 1, "messages")
    asked = replace(asked, sampling=replace(asked.sampling, max_new_tokens=most or left))
    readers = [served.format.reader(prompt.token_ids, prompt.tools) for _ in range(asked.samples)]
    return ChatJob(served, asked, token_ids, prompt.mismatch, readers, begun, echo, with_reasoning, with_experts)


def only(fields: Fields, name: str, value: Any) -> None:
    """Refuses a field that is there with another value than the one by which this server works."""
    given = fields.any(name, value)
    if given != value:
        fields.refuse(name, given, f"only {shown(value)} is served")
