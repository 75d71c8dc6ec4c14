"""The checks of many ranks, on two and on four: one start of ranks for each number, since a start costs seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe.cluster.checks.run import CHECKS

HERE = Path(__file__).parent


def run_on(ranks: int, script: str, *arguments: str) -> str:
    """What a script prints on so many ranks."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*command, str(HERE / script), *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# Four ranks run those that need more than two.
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, list(CHECKS)),
        pytest.param(4, ["mesh", "dispatch", "families", "hybrid", "one-expert", "loading"], marks=pytest.mark.long),
    ],
)
def test_ranks_train_as_one_process_does(ranks: int, names: list[str]) -> None:
    said = run_on(ranks, "checked_ranks.py", *names)
    assert [line.partition(":")[0] for line in said.splitlines()] == names


def test_what_is_wrong_on_one_rank_is_noticed_on_all() -> None:
    """Also where one process computed for an earlier pair, and is not asked again."""
    said = run_on(2, "damaged_ranks.py").splitlines()
    for name, where, size in (
        ("a gradient", "the gradient of embedding.weight", r"\d\.\de-0[5-9]"),
        ("a weight that is no number", "embedding.weight", "inf"),
        ("a weight", "embedding.weight", r"\d\.\de-0[5-9]"),
    ):
        line = f"2: {name}, dp_replicate 2, ep 1: {where} is off by {size} from one process, more than 1e-09"
        assert sum(bool(re.fullmatch(line, one)) for one in said) == 2, said
    assert sorted(one for one in said if one.startswith(("0:", "1:"))) == ["0: True"] * 6 + ["1: True"] * 6
    assert sum(one.startswith("asked for something else, where a pass over sequences of (11, 10)") for one in said) == 6
