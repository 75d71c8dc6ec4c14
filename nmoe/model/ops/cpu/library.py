"""Compiles the C++ kernels for this machine's processor, once, and loads them.

The kernels need Linux and a C++ compiler, `$CXX` or g++. They use the instructions that torch uses: AVX-512, AVX2, or the baseline
of the architecture (`torch.backends.cpu.get_cpu_capability`, which the variable `ATEN_CPU_CAPABILITY` lowers). In fp32 AVX-512 and
AVX2 give the same bits. Without a compiler, torch's operations run instead, slower.

With fast numerics the engine uses all kernels, and the learner the kernels of attention and of the head over a wide vocabulary.
With exact numerics both use the kernels that give a row the same bits in any batch: products and attention.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


def cpu_model() -> str:
    """Returns the processor's model name from /proc/cpuinfo, or else what Python's `platform` says."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features() -> set[str]:
    """Returns the processor's features, as /proc/cpuinfo names them (`avx2`, `avx512f`); empty without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    # "flags" on x86, "Features" on ARM
    return next(
        (set(line.split(":", 1)[1].split()) for line in lines if line.lower().startswith(("flags", "feat"))), set()
    )


_SOURCES = Path(__file__).parent
_UNITS = ("products.cpp", "routing.cpp", "attention.cpp", "prefill.cpp", "packed.cpp", "sampling.cpp", "head.cpp")
_HEADERS = ("vector.h", "tile.h")
# Only the multiplications and additions that the sources fuse are fused, so that every target gives the same bits.
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-ffp-contract=off")
# By torch's name for the instructions. On x86 a machine can play an older one; elsewhere torch's names say little.
_TARGETS = {"AVX512": "-march=native", "AVX2": "-march=x86-64-v3"}
_OTHER_TARGET = "-march=x86-64" if platform.machine() == "x86_64" else "-mcpu=native"
_COMPILE_S = 300
_COMPILING = "compiling-"
_CHECKSUM = 32  # bytes

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@cache
def library(instructions: str | None = None) -> ctypes.CDLL | None:
    """Returns the kernels compiled for these instructions (default: the ones torch uses), or None if they cannot be compiled or
    loaded, or the system is not Linux. Warns if compiling or loading failed."""
    if platform.system() != "Linux":
        return None
    try:
        compiler = shlex.split(os.environ.get("CXX") or "g++")
        return ctypes.CDLL(str(_compiled(compiler, instructions or torch.backends.cpu.get_cpu_capability())))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0:1]
        warnings.warn(
            f"the C++ kernels could not be compiled ({''.join(detail)}), so torch's slower operations run instead; "
            "install g++, or name a C++ compiler in CXX",
            stacklevel=2,
        )
        return None


def _compiled(compiler: Sequence[str], instructions: str) -> Path:
    """Returns the path of the compiled library in the user's cache, and compiles it if needed. Its name has the instructions and a
    hash of all inputs of the compilation. It ends with a checksum of its content, because loading a truncated library would kill
    the process."""
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout
    flags = (*_FLAGS, _TARGETS.get(instructions, _OTHER_TARGET))
    parts = [
        version,
        *flags,
        *sorted(cpu_features()),
        *((_SOURCES / name).read_text() for name in (*_HEADERS, *_UNITS)),
    ]
    directory = _writable_directory()
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    name = re.sub(r"\W+", "", instructions.lower())
    library = directory / f"{name}-{digest[:24]}.so"
    if _is_whole(library):
        return library
    _remove_left_behind(directory)
    # On stderr, as it may come in the middle of any command's output.
    print("compiling the C++ kernels, once on this machine: less than a minute", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=_COMPILING) as made:
        out = Path(made) / library.name
        command = [*compiler, *flags, *(str(_SOURCES / unit) for unit in _UNITS), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        with out.open("rb+") as file:
            checksum = hashlib.file_digest(file, "sha256").digest()
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())  # a name must not reach the disk before its file
        out.replace(library)  # at once: another process may be doing the same
    return library


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return content[-_CHECKSUM:] == hashlib.sha256(content[:-_CHECKSUM]).digest()


def _remove_left_behind(directory: Path) -> None:
    """Deletes directories that killed compilers left in the cache, unless they are so new that the compiler may still run."""
    for left in directory.glob(_COMPILING + "*"):
        try:
            if time.time() - left.stat().st_mtime > 2 * _COMPILE_S:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # another process has just done so
            continue


def cache_directory() -> Path:
    """Returns the directory for compiled libraries, below the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nmoe" / "kernels"


def _writable_directory() -> Path:
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return Path(tempfile.mkdtemp(prefix="nmoe-kernels-"))


def call(name: str, *arguments: Tensor | int | float | None) -> int:
    """Calls a kernel by name: passes tensors as the addresses of their first numbers, None as a null pointer, int as long, float as
    float."""
    loaded = library()
    assert loaded is not None, "the table was chosen by it"
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
