"""The difference between two publications of weights, as files: what changed since the weights that a server has.

Of 2^22 elements at a time, those that changed are marked by a bit each; their bytes, XORed with the old ones, follow in planes, all
first bytes before all second ones; and zlib compresses both. What did not change is not written. Nothing is rounded: old weights
and difference give the new weights bit for bit.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmoe.engine.remote.weights import Format, Source, Update, Written, digest_of
from nmoe.errors import UserError
from nmoe.model.shards import StoredTensors

EVERY = 20
"""Publications from one that sends all weights to every server to the next."""
_ELEMENTS = 2**22
# On real weights higher levels take two to ten times as long for at most a tenth fewer bytes.
_LEVEL = 1
_THREADS = min(4, os.cpu_count() or 1)


class Differences:
    """The weights of the last publication, in this process's memory. A publication is the difference from them, and every
    twentieth one all weights."""

    def __init__(self, written: Written) -> None:
        """`written` makes a directory of tensors that servers can read."""
        self._written = written
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._count = 0

    def prepared(self, source: Source, format: Format, version: int) -> Update:
        """Makes a publication ready, on the thread that trains, as all ranks gather the weights."""
        bases = {} if self._count % EVERY == 0 else self._digests
        came, size = source.weights(format), sum(tensor.nbytes for tensor in self._tensors.values())
        tensors, digests = dict(self._tensors), dict(self._digests)  # a heal may still send the last ones
        taken = _taken(came, bases, tensors, digests)
        try:
            if bases:
                directory, moved = self._written(taken, size)
                info = _named("delta", digests, directory) | {"bases": list(bases.values())}
                update = Update(version, info, size, directory, moved, partial(self._whole, tensors, digests, version))
            else:
                deque(taken, maxlen=0)
                update = self._whole(tensors, digests, version)
        except BaseException:
            deque(came, maxlen=0)  # other ranks gather every tensor
            raise
        self._tensors, self._digests, self._count = tensors, digests, self._count + 1
        return update

    def _whole(self, tensors: dict[str, Tensor], digests: dict[str, str], version: int) -> Update:
        size = sum(tensor.nbytes for tensor in tensors.values())
        directory, moved = self._written(iter(tensors.items()), size)
        return Update(version, _named("disk", digests, directory), size, directory, moved)


def _named(transport: str, digests: dict[str, str], directory: Path) -> dict[str, Any]:
    named = {"names": list(digests), "digests": list(digests.values())}
    return {"transport": transport, **named, "path": str(directory)}


def _taken(
    came: Iterator[tuple[str, Tensor]], bases: dict[str, str], tensors: dict[str, Tensor], digests: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Replaces the old tensors and their digests by new ones, and yields what changed since `bases`."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, tensor in came:
            if (digest := digest_of(tensor)) == digests.get(name):
                continue
            new = tensor.detach().cpu().clone()
            if bases:
                yield from _encoded(pool, name, tensors[name], new)
            tensors[name], digests[name] = new, digest


def _encoded(pool: ThreadPoolExecutor, name: str, old: Tensor, new: Tensor) -> Iterator[tuple[str, Tensor]]:
    before, after = _bits(old), _bits(new)
    starts = range(0, len(before), _ELEMENTS)

    def encode(start: int) -> bytes:
        part = slice(start, start + _ELEMENTS)
        xor = before[part] ^ after[part]
        marks = xor != 0
        changed = xor[marks]
        planes = np.ascontiguousarray(changed.view(np.uint8).reshape(-1, xor.itemsize).T)
        return zlib.compress(np.packbits(marks).tobytes() + planes.tobytes(), _LEVEL) if len(changed) else b""

    for start, data in zip(starts, pool.map(encode, starts), strict=True):
        if data:
            yield f"{name}#{start}", torch.frombuffer(bytearray(data), dtype=torch.uint8)


def patched(old: dict[str, Tensor], stored: StoredTensors) -> dict[str, Tensor]:
    """Returns the new tensors, given the old ones and the files of a difference. Tensors that did not change are the old ones.
    Raises UserError for a difference that is torn or of other tensors."""
    new = dict(old)
    for key in stored.files:
        name, _, start = key.rpartition("#")
        if name not in old or not start.isdecimal():
            raise UserError(f"{stored.listing}: {key} names no part of a tensor that is there")
        if new[name] is old[name]:
            new[name] = old[name].detach().cpu().clone()
        _decode(
            _bits(new[name])[int(start) :][:_ELEMENTS], stored.read(key).numpy().tobytes(), f"{stored.listing}: {key}"
        )
    return new


def _decode(part: np.ndarray[Any, Any], data: bytes, named: str) -> None:
    """Applies the difference of a part of a tensor to it."""
    try:
        content = np.frombuffer(zlib.decompress(data), np.uint8)
    except zlib.error as error:
        raise UserError(f"{named} is torn: {error}") from None
    end = -(-len(part) // 8)
    marks = np.unpackbits(content[:end], count=len(part)).astype(bool)
    planes = content[end:]
    if len(planes) != part.itemsize * marks.sum():
        raise UserError(f"{named} has {len(planes)} bytes for {marks.sum()} elements of {part.itemsize} bytes")
    part[marks] ^= np.ascontiguousarray(planes.reshape(part.itemsize, -1).T).view(part.dtype).reshape(-1)


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Returns a tensor's elements as whole numbers of their size, in the memory that it has if it is on the CPU."""
    bytes_: np.ndarray[Any, Any] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return bytes_.view(f"u{tensor.element_size()}")
