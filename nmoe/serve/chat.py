"""Chat in the terminal: `nmoe chat RUN` with a checkpoint, `nmoe chat --url ADDRESS` with a server.

A checkpoint's questions are rendered as in the run's training environment: in its format, with its system message,
`reasoning_effort`, `chat_template_kwargs` and tools. Its tools run in a sandbox as in training, a new one for each question. For a
checkpoint without an environment, the tokenizer determines the format.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.cores import choose_threads
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import in_format
from nmoe.envs.tools.builtin import load_tools, sandbox_limits
from nmoe.envs.tools.executor import AsyncToolExecutor
from nmoe.envs.tools.servers import pinned
from nmoe.envs.tools.session import ToolSession
from nmoe.envs.tools.tool import Tool
from nmoe.errors import UserError
from nmoe.generation import sampling_notes
from nmoe.model.policy import load_policy_on
from nmoe.runs.resolve import resolve_checkpoint, sandbox_of, trained_on
from nmoe.sandbox.api import Access, SandboxSetupError
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.serve.history import Answer, History
from nmoe.serve.remote_chat import ServerChat
from nmoe.serve.terminal import Screen
from nmoe.text.conversation import ChatMessage, ToolDefinition
from nmoe.text.renderers import ReasoningEffort, RenderFormat
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import ChatFormat, chat_format
from nmoe.types import ExpertWeightsForm, Precision, Sampling, ToolCall

# The share of the context reserved for an answer: a longer history loses its oldest exchanges.
_ANSWERS_SHARE = 0.25
_CUT_OFF = "(cut off: the answer is incomplete)"
_NEW = "/new"


@dataclass(frozen=True)
class Rendering:
    """How a chat's messages become a prompt: a format, the tools declared, and the template's variables."""

    form: ChatFormat
    tools: Sequence[ToolDefinition] = ()
    effort: ReasoningEffort | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def prompt_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.form.prompt_ids(messages, self.tools, self.effort, self.arguments)

    def fitting(self, history: History, context_tokens: int, max_new_tokens: int) -> tuple[list[int], int]:
        """Returns the prompt, and the number of old exchanges that were removed from the history to make room.

        The room is for an answer of `max_new_tokens` tokens, or of a quarter of the context if that is less. Raises UserError if
        the last exchange alone is too long.
        """
        wanted = min(max_new_tokens, max(1, int(_ANSWERS_SHARE * context_tokens)))
        forgotten = 0
        while len(prompt_ids := self.prompt_ids(history.messages)) + wanted > context_tokens:
            if not history.forget_oldest():
                break
            forgotten += 1
        if len(prompt_ids) >= context_tokens:
            raise UserError(f"{len(prompt_ids)} tokens are more than the context of {context_tokens}")
        return prompt_ids, forgotten


class Speaker(Protocol):
    """A model that one can talk to."""

    def answer(self, history: History, screen: Screen, turn: int) -> str | None:
        """Shows the answer to the last question, and adds it to the history; returns a remark to print, if any. Raises UserError if
        there can be no answer."""


class Checkpoint:
    """A model in this process, with the tools of its environment."""

    def __init__(
        self,
        engine: NativeEngine,
        context_tokens: int,
        rendering: Rendering,
        sampling: Sampling,
        toolbox: Toolbox | None = None,
    ) -> None:
        self._engine, self._context_tokens = engine, context_tokens
        self._rendering, self._sampling, self._toolbox = rendering, sampling, toolbox

    def answer(self, history: History, screen: Screen, turn: int) -> str | None:
        return self._engine.run(self._play(history, screen, turn))

    async def _play(self, history: History, screen: Screen, turn: int) -> str | None:
        if self._toolbox is None:
            return await self._sample(history, screen, f"{turn}/0")
        async with self._toolbox.session() as session:
            called = 0
            for number in range(self._toolbox.turns):
                remark = await self._sample(history, screen, f"{turn}/{number}")
                calls = history.messages[-1].calls
                if remark is not None or not calls:
                    return remark
                called += len(calls)
                if number + 1 == self._toolbox.turns or called > self._toolbox.calls:
                    break
                asked = [ToolCall(call.name, str(call.arguments), call.call_id or "") for call in calls]
                for event in await self._toolbox.executor.run(asked, session):
                    screen.show_tool(event.call.name, event.output)
                    history.add(ChatMessage("tool", event.output, name=event.call.name, call_id=event.call.call_id))
        history.drop_calls()
        return "(the budget of turns and tool calls of the training is spent)"

    async def _sample(self, history: History, screen: Screen, key: str) -> str | None:
        """Samples one message, and adds it to the history; returns a remark, if any."""
        limit = self._sampling.max_new_tokens
        prompt, forgotten = self._rendering.fitting(history, self._context_tokens, limit)
        if forgotten:
            print(f"(the oldest {forgotten} earlier exchanges no longer fit the context and are dropped)")
        room = min(limit, self._context_tokens - len(prompt))
        number = int(key.split("/")[0])
        sampling = replace(self._sampling, max_new_tokens=room, seed=self._sampling.seed + number)
        reader, said, ended = self._rendering.form.reader(prompt, self._rendering.tools), Answer(f"{key}/"), False
        try:
            async for deltas in self._engine.stream(Request(tuple(prompt), 1, sampling, f"chat/{key}")):
                token_ids = [delta.token_id for delta in deltas if delta.token_id is not None]
                ended = bool(token_ids) and token_ids[-1] in sampling.stop_ids
                for piece in reader.feed(token_ids):
                    said.add(piece)
                    screen.show(piece)
            for piece in reader.end("stop" if ended else "length"):
                said.add(piece)
                screen.show(piece)
        finally:  # an answer that was stopped stays in the conversation
            history.add(said.message())
            if not ended or self._toolbox is None:
                history.drop_calls()
        return None if ended else _CUT_OFF


class Toolbox:
    """The tools of an environment, and the sandboxes that they run in."""

    def __init__(self, settings: EnvironmentSettings, tools: Mapping[str, Tool], sandbox: SandboxSettings) -> None:
        """Raises SandboxSetupError if a tool wants a sandbox and there is none of this isolation level."""
        assert settings.tools is not None, "an environment with tools has settings of them"
        self.definitions = [tool.definition for tool in tools.values()]
        self.turns, self.calls = settings.budget.turns, settings.budget.tool_calls
        self.executor = AsyncToolExecutor(tools, settings.budget)
        wants_sandbox = any(tool.sandbox_parameter for tool in tools.values())
        self._sandboxes = Sandboxes(sandbox, sandbox_limits(settings.budget)) if wants_sandbox else None
        self._access = Access(settings.tools.read, settings.tools.write)

    def session(self) -> ToolSession:
        """Returns the tools' state for one question."""
        return ToolSession(self._sandboxes, access=self._access if self._access != Access() else None)


def chat(
    checkpoint: Path,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    system: str | None = None,
    form: RenderFormat = "auto",
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
    precision: Precision | None = None,
) -> None:
    """Answers the lines of standard input with a checkpoint, until the input ends; `/new` starts a new conversation.

    Raises UserError if the checkpoint cannot be loaded, the tokenizer lacks the format `form`, or the device is missing.
    """
    torch.set_num_threads(choose_threads(0))
    directory = resolve_checkpoint(checkpoint)
    tokenizer = Tokenizer.load(directory)
    trained = trained_on(checkpoint) if form == "auto" else None
    toolbox, remark = None, None
    if trained is None:
        rendering = Rendering(chat_format(tokenizer, form))
    else:
        trained = in_format(trained, tokenizer)
        toolbox, remark = _toolbox(trained, sandbox_of(checkpoint))
        rendering = Rendering(
            chat_format(tokenizer, "text" if trained.format == "boxed" else trained.format),
            () if toolbox is None else toolbox.definitions,
            trained.reasoning_effort,
            trained.chat_template_kwargs,
        )
        system = trained.system if system is None else system
    model = load_policy_on(directory, device, expert_weights, precision).requires_grad_(False)
    sampling = Sampling(max_new_tokens, temperature=temperature, stop_ids=rendering.form.stop_ids, seed=seed)
    speaker = Checkpoint(
        NativeEngine(model, max_sequences=1), model.config.context_tokens, rendering, sampling, toolbox
    )
    greeting = [f"{directory}; {rendering.form.name}; {_NEW} starts another conversation, Ctrl-D leaves"]
    if toolbox is not None:
        greeting.append(f"tools: {', '.join(tool.name for tool in toolbox.definitions)}")
    greeting += [remark] if remark else []
    _talk(speaker, History(system or ""), [*greeting, *sampling_notes(directory, temperature)])


def chat_with_server(
    url: str, model: str | None, temperature: float, max_new_tokens: int, seed: int, system: str | None = None
) -> None:
    """Answers the lines of standard input with a model of a server of OpenAI's protocol, its first one if none is named. Raises
    UserError if there is no such server."""
    server = ServerChat(url, model, temperature, max_new_tokens, seed)
    try:
        greeting = f"{server.model} at {server.url}; {_NEW} starts another conversation, Ctrl-D leaves"
        _talk(_Server(server), History(system or ""), [greeting])
    finally:
        server.close()


class _Server:
    def __init__(self, server: ServerChat) -> None:
        self._server = server

    def answer(self, history: History, screen: Screen, turn: int) -> str | None:
        said, reason = Answer(f"{turn}/"), ""
        try:
            for piece in self._server.answer(history.messages, turn):
                if isinstance(piece, str):
                    reason = piece
                else:
                    said.add(piece)
                    screen.show(piece)
        finally:
            history.add(said.message())
            history.drop_calls()
        if said.message().calls:
            return "(the model calls tools, which nothing here runs)"
        return _CUT_OFF if reason == "length" else None


def _toolbox(settings: EnvironmentSettings, sandbox: SandboxSettings) -> tuple[Toolbox | None, str | None]:
    """Returns the tools of an environment, or a line that says why there are none; neither if it has none."""
    if (tools := pinned(settings.tools)) is None:
        return None, None
    names = ", ".join([*tools.use, *(server.name for server in tools.servers)])
    if settings.workspace is not None:
        return None, f"the tools of the training ({names}) work on files of its problems, and are not offered here"
    if settings.format == "boxed":
        return None, f"the tools of the training ({names}) are not offered in plain text"
    try:
        return Toolbox(settings, load_tools(tools, settings.budget), sandbox.model_copy(update={"warm": 0})), None
    except SandboxSetupError as error:
        return None, f"the tools of the training ({names}) are not offered here: {error}"


def _talk(speaker: Speaker, history: History, greeting: Sequence[str]) -> None:
    """Reads questions, and shows the answers. On a terminal it prints a prompt, and explains how to leave. There, Ctrl-C stops an
    answer, and two at the prompt end the program."""
    interactive = sys.stdin.isatty()
    if interactive:
        print("\n".join(greeting))
    turn, leaving = 0, False
    while True:
        if interactive:
            print("> ", end="", flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:  # perhaps for an answer that had just ended
            if not interactive:
                raise
            print("" if leaving else "\n(Ctrl-D leaves, and so does another Ctrl-C)")
            if leaving:
                return
            leaving = True
            continue
        if not line:
            return
        leaving = False
        if line.strip() == _NEW:
            history.start_again()
        elif line.strip():
            _exchange(speaker, history, line.strip(), turn, interactive)
            turn += 1


def _exchange(speaker: Speaker, history: History, question: str, turn: int, interactive: bool) -> None:
    """Asks one question. A question without an answer leaves the conversation as it was."""
    screen = Screen()
    history.ask(question)
    try:
        remark = speaker.answer(history, screen, turn)
        screen.end()
    except UserError as error:
        screen.leave()
        remark = str(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not interactive:
            raise
        screen.leave()
        remark = "(stopped)"
    if remark is not None:
        print(remark)
    if not history.answered:
        history.take_back()
