"""Writes sharded tensors to safetensors files, as if one process had the full tensors.

Each rank writes its parts by `torch.distributed.checkpoint`, in a thread, while training continues. Then rank 0 joins
them, tensor by tensor, into the files that one process would have written. So no rank ever holds more than its own
parts and one tensor. Torch can join parts, too, but writes tensors without axes wrongly (2.13), and those with integers
not at all.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from nmoe.parallel.join import SAVING

# How long a rank may write longer than the first one that is done.
_DEADLINE = timedelta(hours=1)
# By their names in the headers of safetensors files.
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Files = Mapping[str, Mapping[str, Tensor]]
"""The tensors of several files: a dictionary from the file's name to its tensors by name."""


class ShardedFiles:
    """Writes one set of files at a time, by the methods `hold`, `start` and `finish` in this order.

    All ranks make such an object, and call `hold` and `start` together; only rank 0 calls `finish`.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._held: dict[str, Tensor] = {}
        self._files: dict[str, list[str]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._source: Path | None = None

    def hold(self, files: Files, copied: bool) -> int:
        """Sets the tensors to write, and returns the number of bytes of all full tensors.

        With `copied`, this rank's parts are copied to host memory, so that later training steps do not change them.
        """
        self._wait()
        if self._group is None:
            # A separate group on the host: collectives of a thread must not mix with training's.
            self._group = dist.new_group(backend="gloo", timeout=_DEADLINE)
        self._files = {file: list(tensors) for file, tensors in files.items()}
        held = {f"{file}/{name}": tensor.detach() for file, of in files.items() for name, tensor in of.items()}
        self._held = BlockingAsyncStager().stage(held) if copied else held
        return sum(tensor.numel() * tensor.element_size() for tensor in held.values())

    def start(self, source: Path) -> None:
        """Starts to write the parts into `source`, a directory that all ranks share."""
        self._source = source
        self._thread = threading.Thread(target=self._write, name=SAVING, daemon=True)
        self._thread.start()

    def finish(self, directory: Path) -> None:
        """Waits until all ranks have written their parts, joins the parts into files in `directory`, and deletes them.

        Raises OSError if a rank could not write; the parts are deleted even then, because on a full disk they would
        occupy the missing space.
        """
        self._wait()
        error, self._error = self._error, None
        assert self._source is not None, "writing was started"
        try:
            if error is not None:
                raise error
            join(self._source, self._files, directory)
        finally:
            shutil.rmtree(self._source, ignore_errors=True)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self) -> None:
        number = {file: index for index, file in enumerate(self._files, 1)}
        index = {f"{file}/{name}": number[file] for file, names in self._files.items() for name in names}
        writer = HuggingFaceStorageWriter(str(self._source), fqn_to_index_mapping=index, save_distributed=True)
        try:
            dcp.save(self._held, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            # What the first rank that failed met with.
            self._error = next(iter(error.failures.values()))[0]
        except BaseException as error:
            self._error = error
        finally:
            self._held = {}


def join(source: Path, files: Mapping[str, list[str]], directory: Path) -> None:
    """Joins the parts in the files of `source` to full tensors, and writes these to the given files. Raises ValueError
    if a part is missing."""
    parts: dict[str, list[tuple[Path, list[int]]]] = defaultdict(list)
    shapes: dict[str, list[int]] = {}
    types: dict[str, str] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            offsets = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                first, part = offsets[key]["saved_offsets"], opened.get_slice(key)
                shape = part.get_shape()
                types[key] = part.get_dtype()
                ends = [start + length for start, length in zip(first, shape, strict=True)]
                shapes[key] = [max(pair) for pair in zip(ends, shapes.get(key, ends), strict=True)]
                parts[key].append((path, first))
    for file, names in files.items():
        keys = {name: f"{file}/{name}" for name in names}
        if missing := [name for name in names if keys[name] not in parts]:
            raise ValueError(f"{source}: no rank wrote {missing[0]} of {file}")
        _join_file(directory / file, {name: (types[key], shapes[key], parts[key]) for name, key in keys.items()}, keys)


def _join_file(
    path: Path, tensors: Mapping[str, tuple[str, list[int], list[tuple[Path, list[int]]]]], keys: Mapping[str, str]
) -> None:
    # In an order that does not depend on what made them, and that aligns them, as the package safetensors writes.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-_TYPES[item[1][0]].itemsize, item[0])))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, _) in tensors.items():
        begin, end = end, end + torch.Size(shape).numel() * _TYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape, parts) in tensors.items():
            tensor, filled = torch.empty(shape, dtype=_TYPES[dtype]), 0
            for file, first in parts:
                with safe_open(file, "pt") as opened:
                    part = opened.get_tensor(keys[name])
                tensor[tuple(slice(at, at + length) for at, length in zip(first, part.shape, strict=True))] = part
                filled += part.numel()
            if filled != tensor.numel():
                raise ValueError(f"{path}: the parts of {name} are {filled} of its {tensor.numel()} numbers")
            out.write(tensor.flatten().view(torch.uint8).numpy().data)
