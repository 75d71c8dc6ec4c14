"""The process of `nmoe serve`: loads the model, listens, and drains at a signal."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import uvicorn
from starlette.types import ASGIApp

from nmoe.cores import choose_threads
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.server.listening import check_key, listening
from nmoe.errors import UserError
from nmoe.generation import sampling_notes
from nmoe.model.checkpoint import fingerprint
from nmoe.model.device import choose_device, dtype_for, kind_of
from nmoe.model.peft_format import is_adapter
from nmoe.model.policy import base_of, load_adapters, load_policy, sampling_precision
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.serve.openai.app import Server, application
from nmoe.serve.openai.limits import Limits
from nmoe.serve.openai.model import Served
from nmoe.serve.openai.settings import Defaults
from nmoe.text.renderers import RenderFormat
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import chat_format
from nmoe.types import ExpertWeightsForm, Precision
from nmoe.web.guard import guarded

KEY = "NMOE_SERVE_KEY"
# Seconds that an unused connection stays open.
_KEEP_ALIVE_S = 75
# Tokens of prompts that a step computes beside streams, which wait for them. On a CPU 512 take as long as five steps of decoding 64
# sequences of a 14M mixture of experts, and cost no more for each than thousands at once; a GPU wants more to be busy.
BESIDE_ON_HOST, BESIDE = 512, 2048
# 64 requests that come together reach the engine within 30 ms, most of them less than a millisecond apart. Begun one by one, they
# would be computed in five pieces beside each other.
SETTLES_S = 0.003
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Options:
    """The options of `nmoe serve`."""

    checkpoint: Path
    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # NAME=DIRECTORY each
    strict: bool = False
    form: RenderFormat = "auto"
    device: str = "auto"
    precision: Precision | None = None
    expert_weights: ExpertWeightsForm = "dequantized"
    numerics: Literal["fast", "exact"] = "fast"
    max_sequences: int = 64
    cache_mb: int = 0
    threads: int = 0
    limits: Limits = field(default_factory=Limits)


def serve(options: Options) -> None:
    """Serves a checkpoint until a signal ends it. Raises UserError if it cannot be loaded, or nothing can listen there."""
    key = os.environ.get(KEY, "")
    check_key(options.host, key, KEY, "use the model")
    bound = listening(options.host, options.port)
    # The kernel breaks off connections whose clients have taken nothing for twice the time after which their requests end.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * options.limits.stalled_s))
    served = _load(options)
    routes = Server(served)
    app = guarded(application(routes), key, options.host, KEY, routes.refuse)
    live(served.engine, app, bound, served.models[0], lambda: routes.end_all("shutdown"), options.limits.drain_s)


def live(
    engine: NativeEngine,
    app: ASGIApp,
    bound: socket.socket,
    name: str,
    end_all: Callable[[], None],
    drain_s: float,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Answers requests until a signal ends the server; prints its address once it can be reached, after `begin` on the event loop.
    Requests that still run after `drain_s` seconds are ended by `end_all`."""
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", log_level="error", access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S, server_header=False, timeout_graceful_shutdown=int(drain_s) + 2,
    )  # fmt: skip
    server = uvicorn.Server(config)
    host, port = bound.getsockname()[:2]
    drain = _Drain(server, end_all, drain_s)

    async def answer() -> None:
        drain.loop = asyncio.get_running_loop()
        begin()
        print(f"{name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        await server.serve([bound])

    # The model and its modules stay. Beside their objects a full collection would wait for tens of thousands of new ones, and
    # connections that have ended, which hold themselves in cycles, would be kept by the thousand.
    gc.collect()
    gc.freeze()
    gc.collect()
    before = [signal.signal(number, drain) for number in _SIGNALS]
    try:
        engine.run(answer())
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)


class _Drain:
    """Ends a server at a signal: it accepts no more connections and lets requests finish, which end with the tokens so far after
    `seconds`. A second signal interrupts the process.

    Python calls it on the main thread, where the engine runs.
    """

    def __init__(self, server: Any, end_all: Callable[[], None], seconds: float) -> None:
        self._server, self._end_all, self._seconds = server, end_all, seconds
        self.loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, number: int, frame: object) -> None:
        if self.loop is None or self._server.should_exit:
            raise KeyboardInterrupt
        self._server.should_exit = True
        self.loop.call_soon_threadsafe(self.loop.call_later, self._seconds, self._end_all)


def _load(options: Options) -> Served:
    torch.set_num_threads(choose_threads(options.threads))
    directory = resolve_checkpoint(options.checkpoint)
    device = choose_device(options.device, "--device")
    dtype = dtype_for(device, sampling_precision(directory, device, options.precision))
    tokenizer = Tokenizer.load(_tokenizer_of(directory))
    form = chat_format(tokenizer, options.form)
    model, lora = load_policy(directory, dtype, device, options.expert_weights)
    model.requires_grad_(False).set_numerics(options.numerics)
    names = options.names or (str(options.checkpoint),)
    directories = _adapters(options.adapters, names)
    adapters = load_adapters(model, directory, directories, fingerprint(directory)) if directories else {}
    defaults = Defaults()
    notes = sampling_notes(directory, defaults.temperature, defaults.top_p, defaults.top_k)
    for line in (*notes, *(lora.notes if lora is not None else ())):
        print(line, file=sys.stderr)
    return Served(
        NativeEngine(
            model,
            options.max_sequences,
            options.cache_mb,
            adapters,
            survives=True,
            beside_tokens=BESIDE_ON_HOST if kind_of(device).on_host else BESIDE,
            settles_s=SETTLES_S,
        ),
        tokenizer,
        form,
        names,
        model.config.context_tokens,
        model.config.vocab_size,
        model.config.layers,
        model.config.experts if model.config.moe_layers else 0,
        f"fp_{(fingerprint(directory) if lora is None else lora.fingerprint)[:16]}",
        tuple(adapters),
        options.strict,
        options.limits,
        defaults,
    )


def _adapters(given: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """Returns the directories of adapters by their names. Raises UserError for one without a name, or with a name in use."""
    directories: dict[str, Path] = {}
    for one in given:
        name, _, directory = one.partition("=")
        if not (name and directory) or name in directories or name in names:
            raise UserError(f"--adapter {one}: must be NAME=DIRECTORY, under a name that no other model has")
        directories[name] = resolve_checkpoint(Path(directory))
    return directories


def _tokenizer_of(directory: Path) -> Path:
    """Returns where the tokenizer of a checkpoint is: an adapter made elsewhere often has none, and its base's holds."""
    if is_adapter(directory) and not any((directory / name).exists() for name in ("tokenizer.json", "tiktoken.model")):
        return base_of(directory)
    return directory
