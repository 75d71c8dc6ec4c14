"""A device whose memory is nearly full."""

from __future__ import annotations

import torch

from nmoe.config.tables.monitor import MemorySection
from nmoe.model.device import kind_of
from nmoe.monitor.rule import Metrics, Rule


class MemoryRule(Rule[MemorySection]):
    name = "memory"
    source = "training guidelines, monitoring: device memory above 95%"
    looks_around = True
    remedies = (
        "lower batch.tokens_per_microbatch, or set model.checkpoint_activations = true",
        "lower engine.cache_mb or engine.max_sequences",
        "end what else runs on the device",
    )

    def __init__(self, settings: MemorySection, device: torch.device) -> None:
        super().__init__(settings)
        self._device = device

    def symptom(self, metrics: Metrics) -> str | None:
        share = kind_of(self._device).peak_memory_share(self._device)
        return f"{share:.1%} of the memory of {self._device} was in use" if share > self.settings.above else None
