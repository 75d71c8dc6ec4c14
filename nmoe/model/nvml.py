"""How busy an NVIDIA GPU is, asked of its driver's management library (NVML), which nvidia-smi reads too."""

from __future__ import annotations

import ctypes
from functools import cache


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the last sample period, up to a second, in which a kernel ran, and memory was read or
    written."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


def utilization(uuid: str) -> int | None:
    """The percent of the last moment in which the GPU of this UUID (`GPU-...`) ran a kernel; None if the driver cannot say."""
    library = _library()
    if library is None:
        return None
    handle, rates = ctypes.c_void_p(), _Utilization()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
        return None
    return int(rates.gpu)


@cache
def _library() -> ctypes.CDLL | None:
    """The library, ready to be asked; None if the driver has none. A result that is not 0 is an error."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
