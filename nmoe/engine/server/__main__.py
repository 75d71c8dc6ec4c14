"""Serves a checkpoint's model over HTTP: `python -m nmoe.engine.server CHECKPOINT`.

It prints one line of JSON with its port on standard output, once it answers. The environment variable NMOE_ENGINE_KEY has the key
that clients have to send; whoever can reach the server without one can change its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import torch

from nmoe.cores import choose_threads
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.server.listening import check_key, listening
from nmoe.engine.server.weights import Weights
from nmoe.errors import UserError
from nmoe.extras import needed_by
from nmoe.model.checkpoint import fingerprint
from nmoe.model.device import choose_device, dtype_for
from nmoe.model.policy import load_policy, sampling_precision
from nmoe.types import ExpertWeightsForm, Precision

KEY = "NMOE_ENGINE_KEY"
# Seconds that an unused connection stays open: as long as a training step takes, or clients would open all of them anew.
_KEEP_ALIVE_S = 3600


def main() -> None:
    options = _options()
    if options.with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _serve(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nmoe.engine.server", description=__doc__)
    add: Any = parser.add_argument
    add("checkpoint", type=Path, help="a directory with a model, or with an adapter whose base is on this machine")
    add("--host", default="127.0.0.1", help="the address to listen on; another than this machine's own needs a key")
    add("--port", type=int, default=0, help="0: the kernel chooses")
    add("--numerics", choices=("fast", "exact"), default="fast")
    add("--device", default="auto")
    add("--expert-weights", choices=get_args(ExpertWeightsForm), default="dequantized", help="how experts are held")
    add("--precision", choices=get_args(Precision), help="of the weights; by default as stored, and bfloat16 on a GPU")
    add("--max-sequences", type=int, default=256, help="sequences that run at once")
    add("--cache-mb", type=int, default=0, help="size of the key-value cache; 0: as the engine chooses")
    add("--threads", type=int, default=0, help="0: as many as there are cores")
    add("--with-parent", action="store_true", help="end when standard input closes")
    return parser.parse_args()


def _serve(options: argparse.Namespace) -> None:
    with needed_by("the engine server", "serve"):
        import uvicorn

        from nmoe.engine.server.app import Service, application
    key = os.environ.get(KEY, "")
    check_key(options.host, key, KEY, "change the weights")
    if options.max_sequences < 1 or min(options.cache_mb, options.threads) < 0:
        raise UserError("--max-sequences counts from 1, --cache-mb and --threads from 0")
    bound = listening(options.host, options.port)
    torch.set_num_threads(choose_threads(options.threads))
    device = choose_device(options.device, "--device")
    precision = sampling_precision(options.checkpoint, device, options.precision)
    model, lora = load_policy(options.checkpoint, dtype_for(device, precision), device, options.expert_weights)
    model.requires_grad_(False).set_numerics(options.numerics)
    engine = NativeEngine(model, options.max_sequences, options.cache_mb)
    config = model.config
    described = {
        "engine": "nmoe",
        "fingerprint": lora.fingerprint if lora is not None else fingerprint(options.checkpoint),
        "vocab_size": config.vocab_size,
        "context_tokens": config.context_tokens,
        "numerics": options.numerics,
        "precision": precision,
        "features": [
            *("versions", "kept_ids", "score", "stream", "partial_abort", "recompute"),
            *(["routes"] if config.moe_layers else []),
            *(["adapter"] if lora is not None else []),
        ],
    }

    async def live() -> None:
        app = application(Service(engine, Weights(engine, model, lora), described), key)
        settings = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_level="warning", access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S, server_header=False,
        )  # fmt: skip
        host, port = bound.getsockname()[:2]
        print(json.dumps({"host": host, "port": port, "pid": os.getpid()}), flush=True)
        await uvicorn.Server(settings).serve([bound])

    engine.run(live())


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
