"""What the tests of the environment kernel share: a small tokenizer, and pools and environments from settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe.config import Locator, Place, Section, parse
from nmoe.config.environment import TaskPool
from nmoe.rl.environment import Environment
from nmoe.rl.pools import Pool, Shard, build_pool
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["Sort: 53914", "the answer is 42", "assistant user system analysis final"] * 5, 320)


@pytest.fixture(scope="session")
def harmony(tokenizer: Tokenizer) -> Harmony:
    return Harmony(tokenizer)


@pytest.fixture
def environment(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Environment]:
    """Makes the environment "demo" of the rest of its TOML text."""

    def make(text: str, *, rank: int = 0, world_size: int = 1) -> Environment:
        path = tmp_path / "environment.toml"
        path.write_text(f'env_id = "demo"\n{text}')
        return Environment.from_toml(path, tokenizer, rank=rank, world_size=world_size)

    return make


class PoolHolder(Section):
    """A task pool is a union; the loader takes sections."""

    pool: TaskPool


@pytest.fixture(scope="session")
def make_pool() -> Callable[..., Pool]:
    """Makes the pool "demo" of a `[task_pool]` table."""

    def make(table: dict[str, Any], rank: int = 0, world_size: int = 1) -> Pool:
        settings = parse({"pool": table}, PoolHolder, Locator(Place("test")))
        return build_pool("demo", settings.pool, Shard(rank, world_size))

    return make
