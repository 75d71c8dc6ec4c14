"""Chat with a checkpoint in the terminal: `nmoe chat RUN`.

Questions are rendered as in the run's training environment: in its format, with its system message, `reasoning_effort`
and `chat_template_kwargs`. Its tools are left out, since nothing here would execute their calls. For a checkpoint
without an environment, the tokenizer determines the format.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from nmoe.cores import choose_threads
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import in_format, renderer_as_trained
from nmoe.errors import UserError
from nmoe.generation import sampling_notes
from nmoe.model.policy import load_policy_on
from nmoe.runs.resolve import resolve_checkpoint, trained_on
from nmoe.text.harmony import Harmony
from nmoe.text.printable import printable
from nmoe.text.renderers import RENDERERS, Renderer, RenderFormat
from nmoe.text.streaming import IncrementalDecoder, StreamParser
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import ExpertWeightsForm, Message, Precision, Sampling

# The share of the context reserved for an answer: a longer history loses its oldest exchanges.
_ANSWERS_SHARE = 0.25


class History:
    """The messages of a conversation so far. Earlier answers are kept without their reasoning, as environments and
    templates do."""

    def __init__(self, renderer: Renderer, system: str, context_tokens: int) -> None:
        self._renderer = renderer
        self._start = [Message("system", system)] if system else []
        self._context_tokens = context_tokens
        self._exchanges: list[tuple[Message, Message]] = []
        self._asked: Message | None = None

    def ask(self, text: str, max_new_tokens: int) -> tuple[list[int], int]:
        """Adds a question; returns the token ids of the prompt, and the number of old exchanges that were removed to make room.

        The room is for an answer of `max_new_tokens` tokens, or of a quarter of the context if that is less. Raises
        UserError if the question alone is too long.
        """
        self._asked = Message("user", text)
        wanted = min(max_new_tokens, max(1, int(_ANSWERS_SHARE * self._context_tokens)))
        forgotten = 0
        while True:
            history = [message for exchange in self._exchanges for message in exchange]
            prompt_ids = self._renderer.prompt_ids([*self._start, *history, self._asked])
            if len(prompt_ids) + wanted <= self._context_tokens:
                return prompt_ids, forgotten
            if not self._exchanges:
                break
            del self._exchanges[0]
            forgotten += 1
        if len(prompt_ids) >= self._context_tokens:
            raise UserError(f"{len(prompt_ids)} tokens are more than the context of {self._context_tokens}")
        return prompt_ids, forgotten

    def answered(self, token_ids: Sequence[int]) -> None:
        """Adds the sampled answer to the history; an empty answer is left out together with its question."""
        assert self._asked is not None, "an answer follows a question"
        _, said = self._renderer.said(token_ids)
        if said.strip():
            self._exchanges.append((self._asked, Message("assistant", said, channel="final")))

    def start_again(self) -> None:
        """Removes all messages except the system message."""
        self._exchanges.clear()


_NEW = "/new"


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
    """Answers the lines of standard input with sampled completions, until the input ends; `/new` starts a new conversation.

    On a terminal it prints a prompt, and explains how to leave. There, Ctrl-C stops an answer, and two at the prompt
    end the program. Raises UserError if the checkpoint cannot be loaded, the tokenizer lacks the format `form`, or the
    device is missing.
    """
    torch.set_num_threads(choose_threads(0))
    directory = resolve_checkpoint(checkpoint)
    tokenizer = Tokenizer.load(directory)
    trained = trained_on(checkpoint) if form == "auto" else None
    renderer = renderer_as_trained(trained, tokenizer) if form == "auto" else RENDERERS[form](tokenizer)
    if system is None:
        system = "" if trained is None else in_format(trained, tokenizer).system
    model = load_policy_on(directory, device, expert_weights, precision).requires_grad_(False)
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{directory}; {renderer.name}; {_NEW} starts another conversation, Ctrl-D leaves")
        if trained is not None and trained.tools is not None and trained.tools.use:
            print(f"the tools of the training ({', '.join(trained.tools.use)}) are not offered here")
        for line in sampling_notes(directory, temperature):
            print(line)
    conversation = History(renderer, system, model.config.context_tokens)
    engine = NativeEngine(model, max_sequences=1)
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
            conversation.start_again()
        elif line.strip():
            try:
                prompt, forgotten = conversation.ask(line.strip(), max_new_tokens)
            except UserError as error:
                print(error)
                continue
            if forgotten:
                print(f"(the oldest {forgotten} earlier exchanges no longer fit the context and are dropped)")
            room = model.config.context_tokens - len(prompt)
            sampling = Sampling(
                min(max_new_tokens, room), temperature=temperature, stop_ids=renderer.stop_ids, seed=seed + turn
            )
            printer = _HarmonyPrinter(tokenizer) if renderer.name == "harmony" else _TextPrinter(tokenizer, sampling)
            sampled: list[int] = []
            try:
                engine.run(_answer(engine, printer, Request(tuple(prompt), 1, sampling, f"chat/{turn}"), sampled))
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print("\n(stopped)")
            else:
                printer.end()
            conversation.answered(sampled)
            turn += 1


async def _answer(
    engine: NativeEngine, printer: _HarmonyPrinter | _TextPrinter, request: Request, sampled: list[int]
) -> None:
    """Streams one answer to the terminal, and appends its token ids to `sampled`."""
    async for deltas in engine.stream(request):
        for token_id in [delta.token_id for delta in deltas if delta.token_id is not None]:
            sampled.append(token_id)
            printer.feed(token_id)


def _shown(text: str) -> str:
    """Escapes control characters of the model's text if it is printed to a terminal, which would obey them."""
    return printable(text) if sys.stdout.isatty() else text


class _HarmonyPrinter:
    """Prints the messages of a Harmony completion as they are sampled, each after its channel's name, and reports
    invalid Harmony."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._parser = StreamParser(Harmony(tokenizer))

    def feed(self, token_id: int) -> None:
        event = self._parser.feed(token_id)
        if event is None:
            return
        if event.kind == "header" and event.message is not None:
            print(f"[{event.message.channel}] ", end="", flush=True)
        elif event.kind == "message":
            print(_shown(event.text), flush=True)
        elif event.kind == "content":
            print(_shown(event.text), end="", flush=True)

    def end(self) -> None:
        completion = self._parser.completion()
        if completion.error is not None:
            print(f"\n(incomplete Harmony: {completion.error})")


class _TextPrinter:
    """Prints a completion as it is sampled, tags for reasoning and calls included, up to the token that ends the turn."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self._decoder, self._stop_ids, self._ended = IncrementalDecoder(tokenizer.decode), sampling.stop_ids, False

    def feed(self, token_id: int) -> None:
        self._ended = token_id in self._stop_ids
        if not self._ended:
            print(_shown(self._decoder.push(token_id)), end="", flush=True)

    def end(self) -> None:
        print(self._decoder.flush())
        if not self._ended:
            print("(cut off: the answer is incomplete)")
