"""Makes the workers of a server agree whether a request about weights succeeded.

vLLM 0.32.0 reads the workers' replies in order and stops at the first that failed; the unread ones are then taken for replies to
the next request. So the workers tell each other how they fared, and only the last one raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.worker.gpu_worker import Worker

_START = "start_weight_update"


def agree() -> None:
    """Lets all requests about weights end alike in every worker. A start ends an update that was left unfinished."""
    for name in ("init_weight_transfer_engine", _START, "update_weights", "finish_weight_update"):
        if not hasattr(getattr(Worker, name), "__wrapped__"):
            setattr(Worker, name, _agreed(getattr(Worker, name)))


def _agreed(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        problem = None
        if method.__name__ == _START:
            self._weight_update_active = False
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            problem = str(error) or repr(error)
        group = get_world_group()
        problems: list[str | None] = [None] * group.world_size
        dist.all_gather_object(problems, problem, group=group.cpu_group)
        if any(problems):
            self._weight_update_active = False
            if self.parallel_config.rank == self.parallel_config.world_size - 1:
                raise ValueError(next(filter(None, problems)))

    return call
