"""Memory between allocated blocks is given back where there is much of it, and only there; while experts learn, between two
micro-batches."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_family

from nmoe.config.tables.model import OptimizerSection
from nmoe.learner import passes
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Outputs, Scored, cross_entropy
from nmoe.model.device import collecting_new_objects

# In a process of its own, whose allocator keeps what is freed. 400 blocks of 1 MB, of which every second one is freed.
SCRIPT = """
import ctypes, sys
from pathlib import Path
from nmoe.model import device
device.keep_freed_memory()
device._LEAST_GAPS = int(sys.argv[1]) * 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
blocks = []
for _ in range(400):
    block = libc.malloc(2**20)
    ctypes.memset(block, 1, 2**20)
    blocks.append(block)
for block in blocks[::2]:
    libc.free(block)
held = resident()
device.return_gaps()
print(held - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="gaps are glibc's")
@pytest.mark.parametrize(("least_mb", "low", "high"), [(64, 180, 220), (100_000, -5, 5)])
def test_gaps_are_returned_where_they_are_large(least_mb: int, low: int, high: int) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(least_mb)], cwd=root, capture_output=True, text=True, check=True
    )
    assert low <= int(done.stdout) <= high


class Held:
    """A tensor that a backward pass needs: there are as many as there are activations."""

    alive = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Held.alive += 1

    def __del__(self) -> None:
        Held.alive -= 1


@pytest.mark.parametrize(("family", "returned"), [("mixtral", [0, 0, 0]), ("llama", [])])
def test_gaps_are_returned_between_micro_batches_of_experts(
    family: str, returned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no activation is alive. A dense model's activations have the same sizes again, and fit."""
    found: list[int] = []
    monkeypatch.setattr(passes, "return_gaps", lambda: found.append(Held.alive))
    learner = Learner(tiny_family(family), OptimizerSection(learning_rate=1e-2), 10, tokens_per_microbatch=8)
    ids_T = torch.arange(24) % 48
    batch = Batch((8, 8, 8), ids_T, ids_T + 1, torch.ones(24, dtype=torch.bool), torch.ones(24) / 24)
    most = 0

    def watched(outputs: Outputs, scored: Scored) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nonlocal most
        most = max(most, Held.alive)
        return cross_entropy(outputs, scored)

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        learner.forward_backward(batch, watched)
    assert most > 20, "activations were counted"
    assert found == returned


# 64 MB of gradients, of two bf16 parameters. Between two steps something else takes 1 MB and stays.
GRADIENTS = """
import torch
from pathlib import Path
from nmoe.learner.optimizer import MasterGradients
from nmoe.model.device import keep_freed_memory
keep_freed_memory()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
gradients = MasterGradients()
parameters = [torch.nn.Parameter(torch.zeros(8 * 2**20, dtype=torch.bfloat16)) for _ in range(2)]
masters = [gradients.master_of(one) for one in parameters]
kept = []
for step in range(3):
    for one in parameters:
        (one * 2).sum().backward()
    assert all(bool((one.grad == 2).all()) for one in masters)
    during = resident()
    for one in masters:
        one.grad = None
    gradients.free()
    print(during - resident())
    kept.append(torch.ones(2**18))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep other things")
def test_the_gradients_of_a_step_leave_no_gap() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", GRADIENTS], cwd=root, capture_output=True, text=True, check=True)
    freed = [int(line) for line in done.stdout.splitlines()]
    assert len(freed) == 3
    assert all(60 <= one <= 68 for one in freed), freed


def test_what_a_run_begins_with_is_left_out_of_collections() -> None:
    class Knot:
        pass

    def tied() -> weakref.ref[Knot]:
        knot = Knot()
        knot.itself = knot
        return weakref.ref(knot)

    # A frozen object leaves the count when its last reference goes, in any thread: exact counts are not asked for.
    gc.unfreeze()
    try:
        with collecting_new_objects():
            assert gc.get_freeze_count() > 100_000
            outer = tied()
            with collecting_new_objects():
                inner = tied()
                gc.collect()
                assert outer() is inner() is None
            assert gc.get_freeze_count() > 100_000
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
