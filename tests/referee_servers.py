"""Small checkpoints, and servers of them that may have a fault."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from forked import Forked

from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer

MODELS = ("moe_tied", "moe_untied", "dense_tied", "dense_untied")
# Seconds of a check on a machine with other work, where a late check says nothing of the server.
SHARED_S = 600.0

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "context_tokens": 512,
    "intermediate_size": 48,
}
_EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_width": 16}


def drawn_checkpoint(directory: Path, kind: str, seed: int = 0) -> Path:
    """Writes a small model whose every weight matters: `kind` is such as "moe_tied"."""
    block, tied = kind.split("_")
    config = ModelConfig(**_SHAPE, **(_EXPERTS if block == "moe" else {}), tie_embeddings=tied == "tied")
    model = Transformer(config).initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.15 if parameter.ndim > 1 else 0.1
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory)
    return directory


@contextmanager
def serving(checkpoint: Path, *, faulty: bool = False, key: str = "", precision: str = "float32") -> Iterator[str]:
    """Serves a checkpoint inside the context, and returns the URL."""
    main = "faulty_server:main" if faulty else "nmoe.engine.server.__main__:main"
    given = (checkpoint, "--precision", precision, "--threads", "1")
    process = Forked(Path.cwd(), *given, main=main, environment={"NMOE_ENGINE_KEY": key})
    try:
        yield f"http://127.0.0.1:{json.loads(process.line())['port']}"
    finally:
        process.kill()


def choose(url: str, fault: str, seed: int) -> dict[str, Any]:
    """Puts a fault in force, and returns its parameters."""
    body = json.dumps({"name": fault, "seed": seed}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(f"{url}/fault", body, {"Content-Type": "application/json"})
    with opener.open(asked, timeout=60) as reply:
        settings: dict[str, Any] = json.load(reply)["settings"]
        return settings
