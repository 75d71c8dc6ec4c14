"""How busy a GPU is, as its driver's library says, which stands here in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nmoe.model import nvml


@pytest.fixture(autouse=True)
def forget_the_library() -> Iterator[None]:
    nvml._library.cache_clear()
    yield
    nvml._library.cache_clear()


def driver(status: int = 0) -> Callable[[str], Any]:
    """A library with one GPU, `GPU-7`, which runs kernels 37% of the time. `status` is that of its start."""

    def by_uuid(uuid: bytes, handle: Any) -> int:
        handle._obj.value = 7
        return 0 if uuid == b"GPU-7" else 6

    def rates(handle: ctypes.c_void_p, into: Any) -> int:
        assert handle.value == 7
        into._obj.gpu, into._obj.memory = 37, 5
        return 0

    library = SimpleNamespace(
        nvmlInit_v2=lambda: status, nvmlDeviceGetHandleByUUID=by_uuid, nvmlDeviceGetUtilizationRates=rates
    )
    return lambda name: library


def test_the_share_of_time_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", driver())
    assert nvml.utilization("GPU-7") == 37
    assert nvml.utilization("GPU-8") is None, "there is no such GPU"


def test_a_driver_that_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", driver(status=9))
    assert nvml.utilization("GPU-7") is None
    nvml._library.cache_clear()

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvml.utilization("GPU-7") is None
