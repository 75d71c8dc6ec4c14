"""Compiles the C++ kernels for the CPU at hand, once per machine, and says where they are in use.

They need Linux on a CPU with AVX-512 and its bf16 products (Zen 4, Sapphire Rapids and later) and a C++ compiler, `$CXX` or g++.
Where something is missing everything runs by torch's operations as before, slower. With fast numerics only the engine takes them
(`in_use`). With exact ones engine and learner take those that give a row the same bits in any batch, products and attention.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCES = Path(__file__).parent
_UNITS = ("products.cpp", "routing.cpp", "attention.cpp", "sampling.cpp")
_HEADERS = ("vector.h", "tile.h")
# GCC 12 takes its own intrinsics' undefined operands for a mistake of ours.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-maybe-uninitialized")
_NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
_COMPILE_S = 300
_COMPILING = "compiling-"
_CHECKSUM = 32  # bytes

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a warning where only the compiler is missing, where there can be none."""
    features = _cpu_features()
    if platform.system() != "Linux" or not features >= _NEEDED:
        return None
    try:
        return ctypes.CDLL(str(_compiled(shlex.split(os.environ.get("CXX") or "g++"), features)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0:1]
        warnings.warn(
            f"decoding goes by torch's operations, which are slower: its kernels could not be compiled ({''.join(detail)}); "
            "install g++, or name a C++ compiler in CXX",
            stacklevel=2,
        )
        return None


def _cpu_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


def _compiled(compiler: Sequence[str], features: set[str]) -> Path:
    """The library's file, in the user's cache under a name that changes with all that goes into it. It ends with a checksum of what
    is before: to load a file that lacks its end would kill the process."""
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout
    parts = [version, *_FLAGS, *sorted(features), *((_SOURCES / name).read_text() for name in (*_HEADERS, *_UNITS))]
    directory = _cache_directory()
    library = directory / (hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24] + ".so")
    if _is_whole(library):
        return library
    _remove_left_behind(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=_COMPILING) as made:
        out = Path(made) / library.name
        command = [*compiler, *_FLAGS, *(str(_SOURCES / unit) for unit in _UNITS), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        with out.open("rb+") as file:
            checksum = hashlib.file_digest(file, "sha256").digest()
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())  # a name must not reach the disk before what it names
        out.replace(library)  # at once: another process may be doing the same
    return library


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return content[-_CHECKSUM:] == hashlib.sha256(content[:-_CHECKSUM]).digest()


def _remove_left_behind(directory: Path) -> None:
    """Deletes what compilers that were killed left; one that may still be running is let be."""
    for left in directory.glob(_COMPILING + "*"):
        try:
            if time.time() - left.stat().st_mtime > 2 * _COMPILE_S:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # another process has just done so
            continue


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(home) / "nmoe" / "kernels"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return Path(tempfile.mkdtemp(prefix="nmoe-kernels-"))


class _Here(threading.local):
    """What is in force in this thread."""

    in_use = False


_here = _Here()


@contextmanager
def in_use() -> Iterator[None]:
    """Operations without gradient take the kernels here, in this thread, where there are any."""
    outer, _here.in_use = _here.in_use, library() is not None
    try:
        yield
    finally:
        _here.in_use = outer


def usable(x: Tensor) -> bool:
    """Whether an operation on `x` is to be a kernel's."""
    return _here.in_use and x.dtype in DTYPES and x.device.type == "cpu" and not torch.is_grad_enabled()


def serves_exact(x: Tensor) -> bool:
    """Whether exact numerics of tensors like this are the kernels'. Engine and learner have to answer alike."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and library() is not None


def call(name: str, *arguments: Tensor | int | float | None) -> int:
    """Calls a kernel: tensors as the addresses of their first numbers, None as no address, int as long, float as float."""
    loaded = library()
    assert loaded is not None, "`usable` was asked"
    function = getattr(loaded, name)
    if function.argtypes is None:
        function.restype = ctypes.c_long
        function.argtypes = [_type(argument) for argument in arguments]
    result: int = function(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))
    return result


def _type(argument: Tensor | int | float | None) -> type[ctypes.c_void_p | ctypes.c_long | ctypes.c_float]:
    if isinstance(argument, int):
        return ctypes.c_long
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_void_p
