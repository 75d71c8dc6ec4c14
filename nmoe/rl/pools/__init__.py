"""Task pools: where verifiable problems come from, in an order that is deterministic, sharded and resumable."""

from __future__ import annotations

from nmoe.config.environment import (
    GeneratedPool,
    HubPool,
    JsonlPool,
    MixturePool,
    ParquetPool,
    ReasoningGymPool,
    TaskPool,
)
from nmoe.data.rows import read_rows
from nmoe.rl.pools.generated import generated_order
from nmoe.rl.pools.mixture import Mixture
from nmoe.rl.pools.order import Order
from nmoe.rl.pools.pool import Pool, Shard
from nmoe.rl.pools.reasoning_gym import reasoning_gym_order
from nmoe.rl.pools.records import columns_of, record_order

__all__ = ["Order", "Pool", "Shard", "build_order", "build_pool"]


def build_pool(name: str, settings: TaskPool, shard: Shard) -> Pool:
    """Loads and checks everything the pool will hand out.

    Raises UserError for data that can not be read, is malformed, or is not there.
    """
    return Pool(build_order(name, settings), shard)


def build_order(name: str, settings: TaskPool) -> Order:
    """The order that all shards of a pool share; raises as `build_pool` does."""
    match settings:
        case GeneratedPool():
            return generated_order(name, settings)
        case JsonlPool():
            return record_order(name, settings, read_rows(settings.path, form="jsonl"), settings.path)
        case ParquetPool():
            needed, optional = columns_of(settings)
            rows = read_rows(settings.path, form="parquet", columns=needed, optional=optional)
            return record_order(name, settings, rows, settings.path)
        case HubPool():
            rows = read_rows(
                settings.dataset, subset=settings.subset, split=settings.split, data_files=settings.data_files
            )
            return record_order(name, settings, rows, f"dataset {settings.dataset!r}")
        case ReasoningGymPool():
            return reasoning_gym_order(name, settings)
        case MixturePool():
            sources = [build_order(source.name, source) for source in settings.sources]
            return Mixture(name, sources, [source.weight for source in settings.sources], settings.seed)
