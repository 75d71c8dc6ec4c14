"""Copies of a run's state at one moment, which a thread can write to disk while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A part of a run's state at one moment, which can be written later.

    write: writes the part's files into an existing directory.
    size: bytes of the tensors that `write` writes; small files are not counted.
    state: further state as JSON, besides the files; None if there is none.
    start: called before `write`, by the thread that trains, with a path on the same disk where other processes begin to write;
    `write` waits for them.
    """

    write: Callable[[Path], None]
    size: int = 0
    state: Any = None
    start: Callable[[Path], None] = lambda directory: None


def hold(tensors: Mapping[str, Tensor], copied: bool) -> tuple[dict[str, Tensor], int]:
    """Returns the tensors without gradients, and their size in bytes. With `copied`, they are copies in host memory, which no later
    step changes."""
    kept = {name: tensor.detach() for name, tensor in tensors.items()}
    if copied:
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in kept.items()}
    return kept, sum(tensor.nbytes for tensor in kept.values())
