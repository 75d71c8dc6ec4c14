"""A conversation in the terminal: one line in, the streamed answer out. `nmoe chat RUN`

Every line is a conversation of its own: what the model was post-trained on are single questions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from nmoe.engine.api import Request, Sampling
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import UserError
from nmoe.model.policy import load_policy
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.threads import choose_threads
from nmoe.text.harmony import Harmony, Message, StreamParser
from nmoe.text.tokenizer import Tokenizer


def chat(checkpoint: Path, temperature: float, max_new_tokens: int, seed: int) -> None:
    """Reads lines from standard input until it ends. On a terminal it prompts and shows how to leave."""
    torch.set_num_threads(choose_threads(0))
    directory = resolve_checkpoint(checkpoint)
    harmony = Harmony(Tokenizer.load(directory))
    model = load_policy(directory)[0]
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{directory}; each line is a conversation of its own; leave with Ctrl-D")
    engine = NativeEngine(model, max_sequences=1)
    turn = 0
    while True:
        if interactive:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            prompt = tuple(harmony.render_prompt([Message("user", line.strip())]))
            room = model.config.context_tokens - len(prompt)
            if room < 1:
                print(UserError(f"{len(prompt)} tokens are more than the context of {model.config.context_tokens}"))
                continue
            sampling = Sampling(
                min(max_new_tokens, room), temperature=temperature, stop_ids=harmony.stop_ids, seed=seed + turn
            )
            engine.run(_answer(engine, harmony, Request(prompt, 1, sampling, f"chat/{turn}")))
            turn += 1


async def _answer(engine: NativeEngine, harmony: Harmony, request: Request) -> None:
    """Streams one answer, each message under its channel's name; broken Harmony is shown as such."""
    parser = StreamParser(harmony)
    async for delta in engine.stream(request):
        event = parser.feed(delta.token_id)
        if event is None:
            continue
        if event.kind == "header" and event.message is not None:
            print(f"[{event.message.channel}] ", end="", flush=True)
        elif event.kind == "message":
            print(event.text, flush=True)
        elif event.kind == "content":
            print(event.text, end="", flush=True)
    completion = parser.completion()
    if completion.error is not None:
        print(f"\n(not a whole answer in Harmony: {completion.error})")
