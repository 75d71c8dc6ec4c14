"""The process of `nmoe serve --tinker`: loads the base, and listens."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nmoe.cores import choose_threads
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.server.listening import check_key, listening
from nmoe.errors import UserError
from nmoe.model.checkpoint import fingerprint, refuse_packed
from nmoe.model.device import choose_device, dtype_for, kind_of
from nmoe.model.policy import load_policy, sampling_precision
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.serve.openai.limits import Limits
from nmoe.serve.openai.process import BESIDE, BESIDE_ON_HOST, KEY, SETTLES_S, Options, live
from nmoe.serve.tinker.app import Server, application
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.resume import resume
from nmoe.serve.tinker.samplers import SLOTS
from nmoe.serve.tinker.service import Service
from nmoe.serve.tinker.store import Store
from nmoe.serve.tinker.weights import Base
from nmoe.text.tokenizer import Tokenizer
from nmoe.web.guard import guarded

# The SDK sends no other keys.
_KEYS = ("tml-", "eyJ")


def serve(options: Options, saved: Path) -> None:
    """Serves a checkpoint to Tinker's clients until a signal ends it; their weights are saved below a directory. Raises UserError
    if it cannot be loaded, or nothing can listen there."""
    key = os.environ.get(KEY, "")
    check_key(options.host, key, KEY, "train and use the model")
    if key and not key.startswith(_KEYS):
        raise UserError(f"{KEY}: the SDK of Tinker sends keys that begin with tml- alone; choose such a key")
    mine, plain = options.limits, Limits()
    for option, given in (
        ("--adapter", options.adapters),
        ("--strict", options.strict),
        ("--format", options.form != "auto"),
        ("--max-body-mb", mine.body_bytes != plain.body_bytes),
        ("--max-prompt-tokens", mine.prompt_tokens != plain.prompt_tokens),
        ("--max-n", mine.samples != plain.samples),
        ("--max-stop", mine.stops != plain.stops),
        ("--max-requests", mine.requests != plain.requests),
        ("--deadline", mine.request_s != plain.request_s),
        ("--stalled", mine.stalled_s != plain.stalled_s),
    ):
        if given:
            raise UserError(f"{option}: is for clients of OpenAI's API; leave it out with --tinker")
    bound = listening(options.host, options.port)
    service = _load(options, saved)
    app = guarded(
        application(Server(service)),
        key,
        options.host,
        KEY,
        lambda refusal: TinkerError(refusal.message, refusal.status).reply(),
        sent=("X-API-Key", ""),
    )
    name = service.names[0]
    live(service.engine, app, bound, name, lambda: None, options.limits.drain_s, lambda: resume(service))


def _load(options: Options, saved: Path) -> Service:
    torch.set_num_threads(choose_threads(options.threads))
    directory = resolve_checkpoint(options.checkpoint)
    device = choose_device(options.device, "--device")
    dtype = dtype_for(device, sampling_precision(directory, device, options.precision))
    tokenizer = Tokenizer.load(directory)
    model, lora = load_policy(directory, dtype, device, options.expert_weights)
    if lora is not None:
        raise UserError(f"{directory}: is an adapter; serve its base, {lora.base}, from which clients train adapters")
    refuse_packed(model, "trained")
    model.requires_grad_(False).set_numerics(options.numerics)
    engine = NativeEngine(
        model,
        options.max_sequences,
        options.cache_mb,
        survives=True,
        beside_tokens=BESIDE_ON_HOST if kind_of(device).on_host else BESIDE,
        settles_s=SETTLES_S,
        slots=SLOTS,
    )
    names = options.names or (str(options.checkpoint),)
    base = Base(model, names[0], directory, fingerprint(directory))
    return Service(engine, base, tokenizer, directory, names, model.config.context_tokens, Store(saved))
