"""Records that a program makes: a list of dicts, or a function that returns or yields them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nmoe.config.registry import POOLS
from nmoe.data.rows import Row
from nmoe.errors import UserError


def called_rows(name: str) -> Iterator[Row]:
    """The records of the pool that `name` names, each with its place: ("my_module:problems, record 0", {...}).

    Raises UserError for a function that fails and for records that are not dicts.
    """
    part = POOLS.get(name)
    try:
        records = part() if callable(part) else part
        if not isinstance(records, Iterable) or isinstance(records, str | bytes | Mapping):
            raise UserError(f"pool {name}: it gives {type(records).__name__}, not a list of records")
        for number, record in enumerate(records):
            if not isinstance(record, Mapping):
                raise UserError(f"pool {name}, record {number}: {record!r} is not a dict")
            yield f"{name}, record {number}", record
    except UserError:
        raise
    except Exception as error:  # the program may raise anything
        raise UserError(f"pool {name}: it raised {type(error).__name__}: {error}") from error
