"""[parallel]: how the processes of a run, its ranks, divide one model among them."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from nmoe.config.base import Conflict, Section

Rdep = Literal["auto", "single", "ipc", "hybrid"]
Transport = Literal["auto", "collective", "symmetric", "deepep"]
Offload = Literal["auto", "none", "cpu"]


class ParallelSection(Section):
    """[parallel]: replicas, shards and expert groups. dp_replicate x dp_shard ranks run together, as torchrun starts them."""

    dp_replicate: PositiveInt = Field(
        default=1, description="replicas of the sharded model (HSDP), for slow links between them"
    )
    dp_shard: PositiveInt | Literal["auto"] = Field(
        default="auto", description="ranks that share one replica's weights; auto: all ranks of a replica"
    )
    ep: PositiveInt | Literal["auto"] = Field(
        default="auto",
        description="ranks that share the experts, to which tokens then travel; divides dp_shard and the number of experts; "
        "auto: the largest such number that a node holds, and at most 8",
    )
    rdep: Rdep = Field(
        default="auto",
        description="where the ranks of an expert group lie: single (ep = 1), ipc (in one node), hybrid (in several); auto "
        "says which",
    )
    transport: Transport = Field(
        default="auto",
        description="how tokens travel to experts: collective (torch.distributed's all-to-all); symmetric and deepep are "
        "refused until they were run",
    )
    offload: Offload = Field(
        default="auto",
        description="where ranks on GPUs keep their shards of weights, gradients and optimizer: none (on the GPU), cpu (in the "
        "machine's memory); auto: cpu where they fit in no other way",
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.dp_shard != "auto" and self.ep != "auto" and self.dp_shard % self.ep:
            yield Conflict("ep", f"must divide dp_shard = {self.dp_shard}")
        if self.ep != "auto" and (self.ep == 1) != (self.rdep == "single") and self.rdep != "auto":
            yield Conflict(
                "rdep", f'"{self.rdep}" does not go with ep = {self.ep}: "single" is an expert group of one rank'
            )
