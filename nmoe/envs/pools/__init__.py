"""Task pools: sources of verifiable problems, in an order that is deterministic and resumable."""

from __future__ import annotations

from nmoe.config.tables.pools import (
    CsvPool,
    GeneratedPool,
    HubPool,
    JsonlPool,
    MixturePool,
    ParquetPool,
    PrmPool,
    ProgramPool,
    PythonPool,
    ReasoningGymPool,
    SelfplayPool,
    TaskPool,
    VerifiersPool,
)
from nmoe.data.rows import read_rows
from nmoe.envs.pools.generated import generated_order
from nmoe.envs.pools.outside import OutsideOrder
from nmoe.envs.pools.pool import Mixture, Order, Pool
from nmoe.envs.pools.prm import prm_order
from nmoe.envs.pools.reasoning_gym import reasoning_gym_order
from nmoe.envs.pools.records import called_rows, columns_of, record_order
from nmoe.envs.pools.selfplay import open_problems

__all__ = ["Order", "Pool", "build_order", "build_pool"]


def build_pool(name: str, settings: TaskPool, *, columns: bool = False) -> Pool:
    """Builds a pool of problems, after loading and checking all its data. With `columns`, problems keep all fields of
    their records.

    Raises UserError for data that cannot be read, is malformed or does not exist.
    """
    return Pool(build_order(name, settings, columns=columns))


def build_order(name: str, settings: TaskPool, *, columns: bool = False) -> Order:
    """Builds the endless sequence of problems; raises as `build_pool` does."""
    match settings:
        case GeneratedPool():
            return generated_order(name, settings)
        case JsonlPool() | ProgramPool():
            return record_order(name, settings, read_rows(settings.path, form="jsonl"), settings.path, columns=columns)
        case VerifiersPool():
            return OutsideOrder(name, settings)
        case CsvPool():
            return record_order(name, settings, read_rows(settings.path, form="csv"), settings.path, columns=columns)
        case ParquetPool():
            needed, optional = (None if columns else columns_of(settings)) or (None, ())
            rows = read_rows(settings.path, form="parquet", columns=needed, optional=optional)
            return record_order(name, settings, rows, settings.path, columns=columns)
        case HubPool():
            rows = read_rows(
                settings.dataset, subset=settings.subset, split=settings.split, data_files=settings.data_files
            )
            return record_order(name, settings, rows, f"dataset {settings.dataset!r}", columns=columns)
        case PythonPool():
            return record_order(name, settings, called_rows(settings.call), settings.call, columns=columns)
        case ReasoningGymPool():
            return reasoning_gym_order(name, settings)
        case PrmPool():
            return prm_order(name, settings)
        case SelfplayPool():
            return open_problems(name, settings)
        case MixturePool():
            sources = [build_order(source.name, source, columns=columns) for source in settings.sources]
            return Mixture(name, sources, [source.weight for source in settings.sources], settings.seed)
