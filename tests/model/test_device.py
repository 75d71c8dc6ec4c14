"""Which device a model gets, what goes to it and comes back, and how busy a GPU is (its driver's library is a stub here)."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import DEVICE, OnDevice, OtherDeviceError, fake_device
from tiny_models import FAMILIES
from torch import Tensor

from nmoe.engine.native.cache import bytes_per_block
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.errors import UserError
from nmoe.model import device
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.config import ModelConfig
from nmoe.model.device import Cuda, choose_device, dtype_for, fetch, put
from nmoe.model.transformer import Transformer


def values(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def test_auto_is_a_gpu_where_there_is_one() -> None:
    with fake_device() as kind:
        assert choose_device() == choose_device("cuda") == choose_device("cuda:0") == DEVICE
        assert choose_device("cpu") == torch.device("cpu")
        with pytest.raises(UserError, match=r'^--device = "cuda:2": there is no such device here, only cuda:0$'):
            choose_device("cuda:2", "--device")
        kind.devices = 0
        assert choose_device() == torch.device("cpu")


def test_a_rank_keeps_the_gpu_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "is_initialized": True, "device_count": 8, "current_device": 3}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert choose_device() == choose_device("cuda") == torch.device("cuda:3")
    assert choose_device("cuda:0") == torch.device("cuda:0")


@pytest.mark.parametrize("asked", ["gpu", "cuda:", "cuda:x", "", "cpu:1", "mps"])
def test_a_name_of_no_device(asked: str) -> None:
    with pytest.raises(
        UserError, match=r'^\[model\] device = ".*" is no device: auto, cpu, cuda or, of several, cuda:1$'
    ):
        choose_device(asked)


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kind.count() == 0
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA: install a build with it" in kind.missing()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "was built for CUDA 12.8 and found no driver or device" in kind.missing()


def test_the_precision_is_the_one_asked_for_or_the_device_s() -> None:
    with fake_device():
        assert dtype_for(DEVICE) == torch.bfloat16
        assert dtype_for(DEVICE, exact=True) == torch.float32
        assert dtype_for(DEVICE, "float16") == torch.float16
        assert dtype_for(torch.device("cpu")) == torch.float32
        assert dtype_for(torch.device("cpu"), "bfloat16") == torch.bfloat16


def test_values_go_to_the_device_and_come_back_in_one_wait() -> None:
    rows = np.arange(6).reshape(2, 3)
    with fake_device() as kind:
        there = [put(rows, DEVICE), put([3, 4], DEVICE), put(torch.tensor([0.5, 2.0]), DEVICE)]
        assert all(tensor.device == DEVICE for tensor in there)
        assert put(there[0], DEVICE) is there[0]
        assert (kind.calls["staged"], kind.waits.total()) == (3, 0)
        back = fetch(*there)
        assert (kind.calls["synchronize"], kind.waits.total()) == (1, 0)
    assert [tensor.tolist() for tensor in back] == [rows.tolist(), [3, 4], [0.5, 2.0]]
    here = put(rows, torch.device("cpu"))
    here[0, 0] = 7
    assert rows[0, 0] == 7


def test_what_is_made_without_a_device_is_found_where_it_is_used() -> None:
    with fake_device():
        x = torch.ones(3, device=DEVICE)
        with pytest.raises(OtherDeviceError, match=r"aten\.mul\.Tensor"):
            _ = x * torch.zeros(3)
        with pytest.raises(OtherDeviceError, match=r"aten\.index_select\.default"):
            x.index_select(0, torch.tensor([0, 2]))
        assert values(x * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_loaded_onto_a_device(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    export_model(Transformer(ModelConfig(**FAMILIES[family])).initialize(0), tmp_path / "model")
    expected = load_model(tmp_path / "model", dtype)
    with fake_device():
        found = load_model(tmp_path / "model", dtype, DEVICE)
        for name, tensor in [*found.state_dict().items(), ("cosines", found.rope_cos)]:
            theirs = expected.rope_cos if name == "cosines" else expected.state_dict()[name]
            assert isinstance(tensor.data, OnDevice), name
            assert tensor.dtype == theirs.dtype
            assert torch.equal(values(tensor), theirs), name


def test_the_cache_is_as_large_as_the_device_has_room_for() -> None:
    config = ModelConfig(**FAMILIES["qwen3"])
    size = bytes_per_block(config, torch.float32)
    with fake_device() as kind:
        kind.free_bytes = 9 * size + 1
        model = Transformer(config).initialize(0).to(DEVICE)
        engine = LLMEngine(model, 64)
        assert engine.scheduler.blocks.blocks == 9
        assert engine.cache.attention.keys.shape[1] == 10  # one for padding
        assert engine.runner.graphs is not None
        # Kernels that depend on the batch are not for exact numerics.
        exact = LLMEngine(model.set_numerics("exact"), 64)
        assert (exact.cache.attention.keys.shape[1], exact.runner.graphs) == (9, None)
        kind.free_bytes = size - 1
        with pytest.raises(UserError, match="holds not even one block"):
            LLMEngine(model, 64)


def test_free_memory_is_shared_with_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    device = torch.device("cuda", 0)
    assert Cuda().cache_bytes(device, 0, trains=False) == 850
    assert Cuda().cache_bytes(device, 600, trains=True) == 160


@pytest.fixture(autouse=True)
def forget_the_library() -> Iterator[None]:
    device._nvml.cache_clear()
    yield
    device._nvml.cache_clear()


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
    assert device.utilization("GPU-7") == 37
    assert device.utilization("GPU-8") is None, "there is no such GPU"


def test_a_driver_that_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", driver(status=9))
    assert device.utilization("GPU-7") is None
    device._nvml.cache_clear()

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert device.utilization("GPU-7") is None
