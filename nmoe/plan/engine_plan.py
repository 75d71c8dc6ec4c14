"""Plans the GPUs of engine servers, before a machine is rented: weights, room for sequences, and the bytes of a publication."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nmoe.config.commands import RLConfig, RunConfig
from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.engine.native.cache import BLOCK_TOKENS, bytes_per_block
from nmoe.plan.estimate import last_published, samples_here, size_of
from nmoe.plan.rank_plan import gib
from nmoe.plan.work import lengths


@dataclass(frozen=True)
class EnginePlan:
    """The memory of one engine server in bytes, to be divided over its GPUs: `weights`, and keys and values of the longest
    sequence, of `tokens`. Each publication moves `published` bytes, and the first rank `keeps` so many in its machine's memory.
    Activations of the engine are not counted."""

    section: RolloutEngineSection
    heads: int
    kv_heads: int
    weights: int
    tokens: int
    sequence: int
    published: int
    keeps: int

    @property
    def gpus(self) -> int:
        """The number of GPUs that the run's own servers take from it; running servers have others."""
        return 0 if self.section.urls else self.section.servers * self.section.tensor_parallel

    def of_gpu(self, tensor_parallel: int) -> tuple[int, int]:
        """Returns the bytes of weights, and of the longest sequence's keys and values, on one of so many GPUs of an engine."""
        return -(-self.weights // tensor_parallel), -(-self.sequence // min(tensor_parallel, self.kv_heads))

    def missing(self, memory: int, tensor_parallel: int | None = None) -> int:
        """Returns how many bytes an engine's share of a GPU's `memory` lacks for weights and one sequence; 0 or less if it fits."""
        return sum(self.of_gpu(tensor_parallel or self.section.tensor_parallel)) - int(
            memory * self.section.memory_share
        )

    def lines(self, memory: int | None) -> list[str]:
        """Returns the lines that `nmoe plan` prints, with whether an engine's GPU fits into `memory` bytes if that is given."""
        section = self.section
        weights, sequence = self.of_gpu(section.tensor_parallel)
        found = [
            f"engines: {len(section.urls) or section.servers}, of {section.tensor_parallel} GPU each; one of these holds:",
            f"  {'weights':<24} {gib(weights):>10}",
            f"  {f'cache of {self.tokens:,} tokens':<24} {gib(sequence):>10}",
            f"and a publication moves {gib(self.published)}"
            + ("" if section.urls or section.kind == "server" else f"; a copy of {gib(self.weights)} lies on disk"),
        ]
        if self.keeps:
            found.append(f"and rank 0 keeps up to {gib(self.keeps)} of earlier weights in its machine's memory")
        if memory is None:
            return found
        named = "" if section.kind == "server" else "engine.memory_share = "
        share = f"{named}{section.memory_share:g} of {gib(memory)}"
        if (missing := self.missing(memory)) <= 0:
            return [*found, f"an engine fits {share}, with a cache for {1 + -missing // sequence:,} sequences"]
        return [
            *found,
            f"an engine does not fit {share}: {gib(missing)} are missing on each GPU; {self._remedy(memory)}",
        ]

    def _remedy(self, memory: int) -> str:
        fitting = (n for n in (1, 2, 4, 8, 16, 32) if self.heads % n == 0 and self.missing(memory, n) <= 0)
        if (wanted := next(fitting, None)) is None:
            return "no engine of up to 32 GPUs fits"
        servers = max(1, self.section.servers * self.section.tensor_parallel // wanted)
        return f'engine.kind = "vllm", engine.tensor_parallel = {wanted} and engine.servers = {servers} fit'


def engine_plan(config: RunConfig) -> EnginePlan | None:
    """Plans the engine servers of a run; None if its own processes sample. Raises UserError if the checkpoint cannot be read."""
    if samples_here(config) or not isinstance(config, RLConfig):
        return None
    size, section = size_of(config), config.placed_engine
    shape, weights = size.shape, size.in_full + size.packed_bytes
    _, tokens = lengths(config, shape.context_tokens)
    adapter = section.transport(size.adapts) == "adapter"
    return EnginePlan(
        section,
        shape.heads,
        shape.kv_heads,
        weights,
        tokens,
        math.ceil(tokens / BLOCK_TOKENS) * bytes_per_block(shape, size.dtype),
        size.trained * size.dtype.itemsize if adapter else weights,
        last_published(config, size, 0),
    )
