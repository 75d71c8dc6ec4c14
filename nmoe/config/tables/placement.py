"""[placement]: the processes of a run, which `nmoe rl train` starts and watches."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import Conflict, Section

PLACED = frozenset({"urls", "wait_s", "tensor_parallel"})
"""The keys of [engine] that the parent of a run sets for its child."""


class PlacementSection(Section):
    """[placement]: `nmoe rl train` starts engine servers and the processes that train, and starts again those that fail."""

    engines: int = Field(default=1, gt=0)
    """number of engine servers, of the kind in [engine]"""
    learner_gpus: int = Field(default=1, gt=0)
    """number of ranks that train, one on a GPU; on a machine without GPUs, of processes"""
    tensor_parallel: int = Field(default=1, gt=0)
    """GPUs that each vllm or sglang server splits the model over"""
    memory_share: float = Field(default=0.85, gt=0, le=1)
    """share of a GPU's memory that a vllm or sglang server takes"""
    layout: Literal["disaggregated", "colocated"] = "disaggregated"
    """`disaggregated`: engines have other GPUs than the ranks that train; `colocated`: they have the same ones, on which 1 -
    memory_share is left to train in"""
    launcher: Literal["local", "ray"] = "local"
    """what starts processes: `local` on this machine, `ray` on the nodes of a Ray cluster"""
    restarts: int = Field(default=3, ge=0)
    """how often training, and each engine, is started again: at once, then after delays that grow; faults count no more after ten
    minutes without another one, and for training a checkpoint of a later step"""
    least_engines: int = Field(default=1, gt=0)
    """number of engines that have to serve; with fewer for wait_s seconds the run ends, and can be resumed"""
    wait_s: float = Field(default=900.0, gt=0)
    """seconds that an engine may be gone before the run does without it, or ends"""
    hung_s: float = Field(default=60.0, gt=0)
    """seconds after which an engine that does not answer is killed and started again"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.launcher == "ray" and self.layout == "colocated":
            yield Conflict(
                "layout", 'cannot be "colocated" with launcher = "ray", which shares no GPU between processes'
            )
        if self.least_engines > self.engines:
            yield Conflict("least_engines", f"are more than the engines = {self.engines}")
