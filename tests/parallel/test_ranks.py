"""Two ranks under torchrun train as one process does."""

import os
import subprocess
import sys
from pathlib import Path

from tiny_models import FAMILIES

TESTS = Path(__file__).parents[1]


def test_two_ranks_give_one_processs_gradients_steps_and_checkpoints(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(TESTS / "parallel/two_ranks.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("agrees") == 2 * len(FAMILIES)
