"""Runs the checks that several ranks compute the same as a single process, each with a time limit."""

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
"""The checks by name: functions that all ranks call together, and that do less work if their argument is true.

Each returns a summary as a text, and raises ShortfallError if a result differs from a single process's.
"""

DEADLINE_S = 300.0


def run_checks(
    only: Sequence[str] = (), say: Callable[[str], None] = print, deadline_s: float = DEADLINE_S, brief: bool = False
) -> None:
    """Runs the named checks, or all, on all ranks; rank 0 calls `say` with a line for each.

    The first check that fails ends the process with its error; a check that exceeds `deadline_s` seconds ends it with
    the stack traces of all threads. `brief` runs fewer steps, and fewer combinations of model and parallel dimensions.
    Raises UserError for an unknown name.
    """
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
