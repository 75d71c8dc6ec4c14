"""Runs the checks of many ranks against one process: each under a deadline, with one line for each."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from nmoe.errors import UserError
from nmoe.rank_checks import loading, training, transport

CHECKS: dict[str, Callable[[bool], str]] = {
    "dtypes": lambda brief: transport.check_dtypes(),
    "mesh": lambda brief: transport.check_meshes(),
    "dispatch": lambda brief: transport.check_dispatch(),
    "families": training.check_families,
    "single-precision": training.check_single_precision,
    "hybrid": training.check_hybrid,
    "splits": training.check_splits,
    "balance": training.check_balance,
    "one-expert": training.check_one_expert,
    "adapters": training.check_adapters,
    "heads": training.check_heads,
    "profiles": training.check_profiles,
    "loading": lambda brief: loading.check_loading(),
    "checkpoints": training.check_checkpoints,
}
"""By name: functions that all ranks of the default group call together, with less work if the argument is true. Each returns its
findings, in words, and raises ShortfallError where something differs from one process."""

DEADLINE_S = 300.0


def run_checks(
    only: Sequence[str] = (), say: Callable[[str], None] = print, deadline_s: float = DEADLINE_S, brief: bool = False
) -> None:
    """Runs the named checks, or all, on all ranks of the default group; rank 0 says one line for each. A check that takes longer
    than the deadline ends the process with the stacks of its threads, and so does the first that fails by its error. Raises
    UserError for an unknown name. In `brief` there are fewer steps, and fewer pairs of model and axes."""
    for name in only:
        if name not in CHECKS:
            raise UserError(f"{name!r} is not a check; known are {', '.join(CHECKS)}")
    for name in only or CHECKS:
        faulthandler.dump_traceback_later(deadline_s, exit=True)
        began = time.monotonic()
        found = CHECKS[name](brief)
        dist.barrier()
        if dist.get_rank() == 0:
            say(f"{name}: {found} ({time.monotonic() - began:.1f} s)")
    faulthandler.cancel_dump_traceback_later()
