"""Receives a set of weights from nmoe's learner, checks it, and loads it into the running model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from nmoe_vllm.adapters import merged
from nmoe_vllm.checks import check
from nmoe_vllm.loading import load, stored_weights, tied_names
from nmoe_vllm.workers import agree


@dataclass
class Init(WeightTransferInitInfo):
    """Where the learner's store listens, for the transport `group`; the other transports need nothing. `rank` is that of this
    server's first worker; the learner is rank 0."""

    host: str = ""
    port: int = 0
    rank: int = 1
    world_size: int = 0
    backend: str = "gloo"
    timeout_s: float = 300.0


@dataclass
class Update(WeightTransferUpdateInfo):
    """One whole set of weights: names and digests of all tensors, and where they are. `path` is a directory with
    `model*.safetensors` (`disk`) or with an adapter in PEFT's format (`adapter`); `dtypes` and `shapes` are those of what is
    broadcast (`group`)."""

    transport: str
    names: list[str]
    digests: list[str]
    path: str = ""
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


def _refuse(config: Any) -> None:
    """Raises ValueError for settings with which vLLM 0.32.0 fails on a CPU."""
    if config.model_config.quantization is not None:
        raise ValueError("a quantised model on a CPU is refused: its packed weights would silently stay as they are")
    if config.scheduler_config.enable_chunked_prefill:
        raise ValueError(
            "start with --no-enable-chunked-prefill: on a CPU a request with a seed whose prefill is split ends the server "
            "('CPU Generator does not use offset')"
        )


class Receiver(WeightTransferEngine[Init, Update]):
    """Takes one whole set of weights with each update. Nothing of the model is touched before the set was checked."""

    init_info_cls, update_info_cls = Init, Update
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.device.type == "cpu":
            _refuse(self.vllm_config)
        agree()
        self._group: Any = None
        self._came = False
        self._stored = stored_weights(self.vllm_config, self.model)
        self._optional = tied_names(self._stored, self.model)

    def init_transfer_engine(self, init_info: Init) -> None:
        self.shutdown()
        if not init_info.host:
            return
        timeout = timedelta(seconds=init_info.timeout_s)
        parallel = self.parallel_config
        rank = init_info.rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(init_info.host, init_info.port, init_info.world_size, False, timeout)
        place = dist.PrefixStore("nmoe", store), rank, init_info.world_size
        self._device = torch.device("cpu" if init_info.backend == "gloo" else self.device)
        if init_info.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(*place, options)
        else:
            self._group = dist.ProcessGroupGloo(*place, timeout)
        # The learner's first broadcast: NCCL makes its communicator here, while vLLM is paused.
        self._group.broadcast(torch.zeros(1, device=self._device), 0).wait()

    def start_weight_update(self) -> None:
        self._came = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, info: Update) -> None:
        self._came = False
        path = Path(info.path)
        if info.transport == "adapter":
            adapter = load_file(path / "adapter_model.safetensors")
            check(adapter, info.names, info.digests, adapter)
            tensors = merged(self._stored, adapter, json.loads((path / "adapter_config.json").read_text()))
        else:
            # A broadcast is taken to its end before anything is refused, so that the learner's does not wait for ever.
            tensors = self._broadcast(info) if info.transport == "group" else _read(path)
            check(tensors, info.names, info.digests, self._stored, self._optional)
        load(self.model, self.model_config, tensors, self.device.type == "cpu")
        self._came = True

    def finish_weight_update(self) -> None:
        if not self._came:
            raise ValueError("no weights came since the update was started; send them, then finish")

    def shutdown(self) -> None:
        self._group = None

    def _broadcast(self, info: Update) -> dict[str, Tensor]:
        if self._group is None:
            raise ValueError(
                "transport = 'group' needs host, port, rank and world_size in /init_weight_transfer_engine"
            )
        tensors = {}
        for name, dtype, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._group.broadcast(tensor, 0).wait()
            tensors[name] = tensor.cpu()
        return tensors


def _read(place: Path) -> dict[str, Tensor]:
    return {name: tensor for file in place.glob("model*.safetensors") for name, tensor in load_file(file).items()}
