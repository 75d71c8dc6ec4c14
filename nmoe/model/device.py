"""The device that a model computes on. No other module asks which devices this machine has, or knows what a kind of device needs.

All other code takes a `torch.device`, moves tensors by `put` and `fetch`, and asks `kind_of(device)` for the rest. A test can add a
kind to `KINDS`, and so run every branch for accelerators on a machine without one (`tests/fake_device.py`).

Weights and draws come from generators on the CPU on every device, so that a seed means the same numbers everywhere.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import re
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.config.tables.model import DEVICE
from nmoe.errors import UserError
from nmoe.model.ops.cpu.library import cpu_features
from nmoe.types import Precision


class _Utilization(ctypes.Structure):
    """NVML's `nvmlUtilization_t`: the percent of the last sample period (up to a second) in which a kernel ran, and in which memory
    was read or written."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


def utilization(uuid: str) -> int | None:
    """Returns the percent of the last second or less in which the GPU of this UUID (`GPU-...`) ran a kernel; None if the driver
    cannot say."""
    library = _nvml()
    if library is None:
        return None
    handle, rates = ctypes.c_void_p(), _Utilization()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
        return None
    return int(rates.gpu)


@cache
def _nvml() -> ctypes.CDLL | None:
    """Loads and initialises NVML, NVIDIA's management library; returns None if it is missing or fails. Its functions return 0 for
    success."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


# `record(run)` calls `run` at least once and returns a function that does the same again, on the present content of the buffers.
Record = Callable[[Callable[[], None]], Callable[[], None]]

# The default bound of an engine's cache on a CPU.
_CPU_CACHE_BYTES = 4 * 2**30

# Instructions that multiply bfloat16: without one it is slower than float32.
_BF16_PRODUCTS = {"avx512_bf16", "amx_bf16"}

# The share of an accelerator's free memory that an engine's cache takes by default. The rest is for the activations and logits of
# training or, where nothing is trained, of one step of the engine.
_SHARE_BESIDE_TRAINING, _SHARE_ALONE = 0.4, 0.85


# Gaps in the host's memory that are worth the time in which the kernel clears their pages again.
_LEAST_GAPS = 2**30


class Kind:
    """A kind of device and what the rest of the code has to know of it. This base class describes the CPU."""

    name = "cpu"
    on_host = True
    precision: Precision = "float32"  # of weights and activations where nothing else is asked for

    def sampling_precision(self, stored: torch.dtype) -> Precision:
        """Returns the default precision of a model that is only sampled, not trained.

        It is bfloat16 if the weights are stored in it and the processor can multiply it, else float32.
        """
        return "bfloat16" if stored == torch.bfloat16 and _BF16_PRODUCTS & cpu_features() else "float32"

    def count(self) -> int:
        """Returns the number of devices of this kind on this machine."""
        return 1

    def at(self, number: int | None) -> torch.device:
        """Returns the device with this index, counted from 0; for None this process's current one."""
        return torch.device("cpu")

    def missing(self) -> str:
        """Returns why this machine has no device of this kind, and the remedy, as a text."""
        raise AssertionError("there is always a CPU")

    def prepare(self, device: torch.device) -> None:
        """Makes this the process's current device, and asks torch for deterministic operations."""
        # Not use_deterministic_algorithms, which asks the compiler, too, and imports it for that: 1.5 s of every command.
        torch.set_deterministic_debug_mode("error")

    def describe(self, device: torch.device) -> str:
        """Returns the name of the device, as a run's provenance records it."""
        return self.name

    def synchronize(self, device: torch.device) -> None:
        """Waits until all work of the device is done."""

    def staged(self, tensor: Tensor) -> Tensor:
        """Returns a host tensor's values in memory from which the device can copy them without the host waiting: for a GPU a copy
        in pinned host memory, for a CPU the tensor itself."""
        return tensor

    def cache_bytes(self, device: torch.device, to_come: int, trains: bool) -> int:
        """Returns the default limit in bytes of an engine's key-value cache. `to_come` is the number of bytes that will be needed
        for other things; `trains` is whether the engine shares the device with training."""
        return _CPU_CACHE_BYTES

    def peak_memory_share(self, device: torch.device) -> float:
        """Returns the highest share of the device's memory that was in use since the last call; 0 for a device that uses
        the host's memory."""
        return 0.0

    def is_busy(self, device: torch.device) -> bool | None:
        """Returns whether the device is computing at this moment; None if that is unknown, as for a CPU or a driver that cannot
        say."""
        return None

    def records_groups(self, device: torch.device) -> bool:
        """Returns whether a grouped matrix product can be part of a recorded graph: the host must not need to know the groups'
        sizes."""
        return False

    def recorder(self) -> Record:
        """Returns a recorder, which records a decode step so that it can be replayed by one launch."""
        raise AssertionError("only an accelerator's launches are worth recording")


class Cuda(Kind):
    """NVIDIA's GPUs."""

    name = "cuda"
    on_host = False
    precision: Precision = "bfloat16"

    def sampling_precision(self, stored: torch.dtype) -> Precision:
        return self.precision

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def at(self, number: int | None) -> torch.device:
        if number is None:  # a rank has been given its own when it joined the others
            number = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        return torch.device("cuda", number)

    def missing(self) -> str:
        if torch.version.cuda is None:
            return (
                f"torch {torch.__version__} was built without CUDA: install a build with it "
                "(https://pytorch.org/get-started/locally)"
            )
        return (
            f"torch {torch.__version__} was built for CUDA {torch.version.cuda} and found no driver or device: see what "
            "nvidia-smi says, and CUDA_VISIBLE_DEVICES"
        )

    def prepare(self, device: torch.device) -> None:
        """Makes this the process's current device, and asks torch for deterministic operations.

        Suppresses torch's warnings about operations without a deterministic kernel, such as the backward pass of
        attention.
        """
        # Read by cuBLAS when it first starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")

    def describe(self, device: torch.device) -> str:
        return f"{device} ({torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda})"

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def staged(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def cache_bytes(self, device: torch.device, to_come: int, trains: bool) -> int:
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is free, too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free - to_come) * (_SHARE_BESIDE_TRAINING if trains else _SHARE_ALONE))

    def peak_memory_share(self, device: torch.device) -> float:
        """Counts torch's allocations at their peak, and other processes at what they hold now. Memory that torch reserves but did
        not use does not count."""
        free, total = torch.cuda.mem_get_info(device)
        peak = total - free - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / total

    def is_busy(self, device: torch.device) -> bool | None:
        percent = utilization(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return None if percent is None else percent > 0

    def records_groups(self, device: torch.device) -> bool:
        return torch.cuda.get_device_capability(device) >= (9, 0)

    def recorder(self) -> Record:
        return CudaRecorder()


class CudaRecorder:
    """Records functions as CUDA graphs. The graphs share one memory pool, since they are replayed one at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        # In the first calls libraries choose kernels and Triton compiles them, which cannot be recorded.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


# By the type of a `torch.device`. "auto" is the first of which there is one, the CPU last.
KINDS: dict[str, Kind] = {"cuda": Cuda(), "cpu": Kind()}


def kind_of(device: torch.device) -> Kind:
    """Returns the kind of this device. A kind that is not listed (torch's `meta`) is treated as the CPU."""
    return KINDS.get(device.type, KINDS["cpu"])


def choose_device(asked: str = "auto", named: str = "[model] device") -> torch.device:
    """Returns the device for "auto", "cpu", "cuda" or "cuda:1"; "auto" is a GPU if the machine has one, and without a number it is
    the process's current one. Raises UserError if there is no such device; `named` is the setting or option that the message
    blames."""
    name, _, index = asked.partition(":")
    if re.fullmatch(DEVICE, asked) is None:
        raise UserError(f'{named} = "{asked}" is no device: auto, cpu, cuda or, of several, cuda:1')
    if name == "auto":
        name = next(kind for kind, of_kind in KINDS.items() if of_kind.count())
    kind = KINDS[name]
    if int(index or 0) < (found := kind.count()):
        return kind.at(int(index) if index else None)
    if found:
        there = ", ".join(f"{name}:{i}" for i in range(found))
        raise UserError(f'{named} = "{asked}": there is no such device here, only {there}')
    raise UserError(f'{named} = "{asked}": no {name.upper()} device was found; {kind.missing()}, or ask for "cpu"')


def precision_for(device: torch.device, asked: Precision | None = None, exact: bool = False) -> Precision:
    """Returns the precision `asked` for, or else float32 for exact numerics, or else the device's default."""
    return asked or ("float32" if exact else kind_of(device).precision)


def dtype_for(device: torch.device, asked: Precision | None = None, exact: bool = False) -> torch.dtype:
    """Returns the torch dtype of weights and activations for the precision that `precision_for` chooses."""
    dtype: torch.dtype = getattr(torch, precision_for(device, asked, exact))
    return dtype


def put(values: NDArray[Any] | Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Copies host values to the device without the host waiting. On a CPU, the result shares memory with an array or a tensor. A
    sequence becomes int64."""
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    elif not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=torch.int64)
    if values.device == device:
        return values
    return kind_of(device).staged(values).to(device, non_blocking=True)


def on_own_pages(count: int, device: torch.device) -> Tensor:
    """Returns `count` fp32 numbers (their values are arbitrary) whose memory goes back as a whole once no tensor uses it.

    For a large buffer that is freed while others live: on the host it leaves no gap for smaller allocations to take parts of
    (`keep_freed_memory` keeps even blocks of half a gigabyte in glibc's heap).
    """
    if not count or device.type == "meta" or not kind_of(device).on_host:
        return torch.empty(count, device=device)
    return torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32)


def fetch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies tensors from one device to the host, which waits once for all of them."""
    copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
    if tensors:
        kind_of(tensors[0].device).synchronize(tensors[0].device)
    return copies


class _Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`, of version 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for later allocations rather than return it to the system.

    A training step frees and allocates buffers of many megabytes, and the kernel clears every page of a new one.
    Without this setting, that took half of the system time of a step (0.9 of 7 s in all). Other C libraries are left as
    they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_mmap_threshold = -1, -3  # from malloc.h
    mallopt(m_mmap_threshold, 2**30)
    mallopt(m_trim_threshold, 2**31 - 1)


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Exempts the objects that exist already from garbage collection inside the `with` block; does nothing in a process that has
    exempted some itself.

    A run begins with 220,000 of them, of modules that stay: a collection (`return_freed_memory`) took 0.12 s for them, as long as
    two steps of a small model.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def return_freed_memory() -> None:
    """Gives the system back the freed memory that glibc has kept (`keep_freed_memory`). Does nothing under other C libraries."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def return_gaps() -> None:
    """Gives the system back the memory between allocated blocks, where that exceeds 1 GiB and an eighth of the allocated bytes.

    Experts have another number of rows in every micro-batch, so that no activation fits where another one was: a mixture of
    373M weights held 10.9 GB in its second step, of which 3.2 GB were gaps. With gaps given back between micro-batches it held
    9.2 GB there, and 9.4 GB in 60 steps. Does nothing under C libraries without mallinfo2.
    """
    c = ctypes.CDLL(None)
    if platform.libc_ver()[0] != "glibc" or not hasattr(c, "mallinfo2"):
        return
    c.mallinfo2.restype = _Allocated
    found = c.mallinfo2()
    allocated = found.uordblks + found.hblkhd
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    if resident - allocated > max(_LEAST_GAPS, allocated / 8):
        c.malloc_trim(0)
