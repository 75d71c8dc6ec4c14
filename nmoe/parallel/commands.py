"""Commands to ranks and their answers, as they are written on the wire."""

from __future__ import annotations

import io
import pickle
import re
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import dill
import torch.distributed as dist

from nmoe.errors import UserError

# What gloo says where another rank has left a collective.
_LEFT = re.compile(r"[Cc]onnection (closed|reset)|[Tt]imed out|Broken pipe|peer", re.ASCII)


@dataclass(frozen=True)
class Command:
    """What a member is to call and to do with the result; and the results that it can forget."""

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Literal["keep", "send", "drop"]
    dropped: tuple[int, ...]


@dataclass(frozen=True)
class End:
    exit_code: int


@dataclass(frozen=True)
class Failure:
    """What a member raised. "peer": what torch raises where another rank has left."""

    kind: Literal["user", "peer", "defect"]
    message: str
    exit_code: int = 1

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, UserError):
            return cls("user", str(error), error.exit_code)
        peer = isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or bool(_LEFT.search(str(error))))
        return cls("peer" if peer else "defect", "".join(traceback.format_exception(error)))

    def error(self, rank: int) -> Exception:
        if self.kind == "user":
            error = UserError(f"rank {rank}: {self.message}")
            error.exit_code = self.exit_code
            return error
        return RuntimeError(f"rank {rank} raised:\n{self.message}")


class Pickler(pickle.Pickler):
    """Writes an object that a command made as the number of the command, and functions within functions by value, as recipes'
    losses are."""

    def __init__(self, file: io.BytesIO, numbers: Mapping[int, int]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and "<" in obj.__qualname__:
            return dill.loads, (dill.dumps(obj),)
        return NotImplemented


class Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, made: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._made = made

    def persistent_load(self, pid: int) -> Any:
        return self._made[pid]
