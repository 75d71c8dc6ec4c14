"""The checks of many ranks, on two and on four: one start of ranks for each number, since a start costs seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe.cluster.checks.run import CHECKS

HERE = Path(__file__).parent


# Four ranks run those that need more than two.
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, list(CHECKS)), (4, ["mesh", "dispatch", "families", "hybrid", "one-expert", "loading"])]
)
def test_ranks_train_as_one_process_does(ranks: int, names: list[str]) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*command, str(HERE / "checked_ranks.py"), *names], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == names
