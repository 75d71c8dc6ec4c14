"""An accelerator for tests on a machine without one: a device whose tensors hold their values on the CPU, and which behaves
towards the host as a GPU does.

Its tensors say that they are on `meta:7`, a device that torch's autograd runs without any runtime. An operation that mixes them
with host tensors raises, as on CUDA, and so a tensor that was made without a device is found where it is used. Counted are the
operations for which a GPU's host has to wait.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import nmoe
from nmoe.model import device as devices
from nmoe.model.device import Kind, Record
from nmoe.types import Precision

DEVICE = torch.device("meta", 7)

aten = torch.ops.aten

# How the names of nmoe's files begin, wherever it lies: the checkout is called nmoe, too.
_PACKAGE = f"{Path(nmoe.__file__).parent}{os.sep}"

# Their results' shapes, or what they return, depend on values, which the host has to know.
_WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
}


_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


class OtherDeviceError(RuntimeError):
    """An operation on tensors of the device and of the host."""


class OnDevice(Tensor):
    """A tensor of the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        out = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        out.inner = inner
        return out

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnDevice({self.inner})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _is_ours(device: object) -> bool:
    return device is not None and torch.device(device) == DEVICE  # type: ignore[call-overload]


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    ours = any(isinstance(leaf, OnDevice) for leaf in leaves)
    asked = kwargs.get("device")
    if asked is not None:
        stays = _is_ours(asked)
        if stays:
            kwargs = {**kwargs, "device": torch.device("cpu")}
    else:
        stays = ours
    if not ours and not stays:
        return func(*args, **kwargs)
    host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice) and leaf.dim() > 0]
    # Copies, and host indices into a tensor of the device, which CUDA copies to it.
    allowed = func in (aten.copy_.default, aten._to_copy.default) or (
        func in _INDEXING and isinstance(args[0], OnDevice)
    )
    if ours and host and not allowed:
        raise OtherDeviceError(f"{func}: tensors of the device and of the host, {[tuple(x.shape) for x in host]}")
    _count(func, args, kwargs, ours, stays, host)
    if func is aten.copy_.default and not isinstance(args[0], OnDevice):
        stays = False

    def inner(leaf: Any) -> Any:
        # A tensor on torch's own meta device has no values: what is made like it is empty.
        if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice) and leaf.is_meta:
            return torch.empty_like(leaf, device="cpu")
        return leaf.inner if isinstance(leaf, OnDevice) else leaf

    if stays and kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    out = func(*tree_map(inner, args), **tree_map(inner, kwargs))
    if not stays:
        return out
    held = {id(leaf.inner): leaf for leaf in leaves if isinstance(leaf, OnDevice)}
    return tree_map(lambda x: held.get(id(x), OnDevice(x)) if isinstance(x, Tensor) else x, out)


def _count(func: Any, args: Any, kwargs: dict[str, Any], ours: bool, stays: bool, host: list[Tensor]) -> None:
    waits = func in _WAITS and ours
    if func is aten._to_copy.default and ours != stays:
        waits = not kwargs.get("non_blocking", False)
    if func is aten.copy_.default and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
        waits = not (len(args) > 2 and args[2])
    if func in _INDEXING:
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        waits = any(index.dtype == torch.bool or not isinstance(index, OnDevice) for index in indices)
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        waits = True
    if waits:
        # Where in nmoe, for the message of a test that counts them.
        frame = sys._getframe()
        while frame.f_back is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        if frame.f_code.co_name == "paged_attention":
            return  # the reference stands in for a kernel that does not wait
        where = f"{frame.f_code.co_filename.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        KIND.waits[f"{func} at {where}"] += 1


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class FakeKind(Kind):
    """The device as `nmoe.model.device` sees it. `waits` counts the operations that a GPU's host waits for, by operation and line;
    `calls` those of this seam."""

    name = "cuda"
    on_host = False
    precision: Precision = "bfloat16"

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.devices, self.free_bytes = 1, 2**20
        self.memory_share, self.busy = 0.5, True

    def count(self) -> int:
        return self.devices

    def at(self, number: int | None) -> torch.device:
        return DEVICE

    def missing(self) -> str:
        return "this one is a test's"

    def prepare(self, device: torch.device) -> None:
        self.calls["prepare"] += 1

    def describe(self, device: torch.device) -> str:
        return "cuda:0 (a test's)"

    def synchronize(self, device: torch.device) -> None:
        self.calls["synchronize"] += 1

    def staged(self, tensor: Tensor) -> Tensor:
        self.calls["staged"] += 1
        return tensor

    def cache_bytes(self, device: torch.device, to_come: int, trains: bool) -> int:
        self.calls["cache_bytes"] += 1
        return self.free_bytes

    def peak_memory_share(self, device: torch.device) -> float:
        assert device == DEVICE
        return self.memory_share

    def is_busy(self, device: torch.device) -> bool | None:
        return self.busy

    def records_groups(self, device: torch.device) -> bool:
        return True

    def recorder(self) -> Record:
        def record(run: Callable[[], None]) -> Callable[[], None]:
            self.calls["recorded"] += 1
            before = self.waits.total()
            run()
            run()
            assert self.waits.total() == before, f"what is recorded must not wait: {self.waits}"
            return run

        return record


KIND = FakeKind()


@contextmanager
def fake_device() -> Iterator[FakeKind]:
    """Puts the device in CUDA's place: inside, "cuda" and "auto" are it."""
    global KIND
    KIND = FakeKind()
    before = dict(devices.KINDS)
    devices.KINDS.update(cuda=KIND, meta=KIND)
    # Wrapped tensors have no views under inference mode.
    inference = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = torch.no_grad.__enter__, torch.no_grad.__exit__
    try:
        with _Mode():
            yield KIND
    finally:
        torch.inference_mode.__enter__, torch.inference_mode.__exit__ = inference
        devices.KINDS.clear()
        devices.KINDS.update(before)
