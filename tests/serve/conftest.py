"""A tiny checkpoint, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_templates import qwen
from served_client import CONTEXT, Client, serving
from tiny_models import tiny_family

from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.transformer import Transformer
from nmoe.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with a chat template in the style of Qwen3."""
    directory = tmp_path_factory.mktemp("served") / "tiny"
    directory.mkdir()
    tokenizer = qwen(directory)
    export_model(tiny_family("qwen3_moe", 0, context_tokens=CONTEXT, vocab_size=tokenizer.vocab_size), directory)
    tokenizer.save(directory)
    return directory


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Transformer:
    model = load_model(checkpoint).requires_grad_(False)
    model.set_numerics("exact")
    return model


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


@pytest.fixture(scope="session")
def client(checkpoint: Path) -> Iterator[Client]:
    with serving(checkpoint, "--numerics", "exact", "--max-sequences", "8") as running:
        yield running
