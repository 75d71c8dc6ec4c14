"""Runs under torchrun: what several ranks do together is what one process does alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.rl.launch import train


def ranks(count: int, *arguments: str, module: str = "nmoe.rl") -> subprocess.CompletedProcess[str]:
    """A command of `python -m module` on this many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


# What only ranks that share experts have.
OF_RANKS = {"rdep_bytes", "time_dispatch_s"}


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def close(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    """All figures of every step agree: counts to the last digit, and sums of fp32 to their rounding."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() - OF_RANKS == other.keys() - OF_RANKS
        for name, value in mine.items():
            if (
                name not in OF_RANKS
                and not name.startswith("time")
                and not name.endswith("per_second")
                and isinstance(value, int | float)
            ):
                assert value == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


@pytest.fixture
def train_on(workshop: Path, base: Path, tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """Trains in a directory of this name on so many ranks, one being this process, and returns the run's metrics."""

    def train_on(count: int, where: str, steps: int, *more: str) -> list[dict[str, float]]:
        config, overrides = workshop / "rl.toml", [f"--run.directory={tmp_path / where}", f"--run.steps={steps}"]
        overrides += ["--checkpoint.every_steps=2", "--model.numerics=exact", *more]
        if count == 1:
            train(load_run(config, RLConfig, overrides))
        else:
            done = ranks(count, "train", str(config), *overrides)
            assert done.returncode == 0, done.stderr[-4000:]
        return metrics(tmp_path / where / "rl")

    return train_on


def test_reinforcement_learning(train_on: Callable[..., list[dict[str, float]]]) -> None:
    alone = train_on(1, "alone", 4)
    close(train_on(2, "ranks", 4), alone)
    assert max(row["mismatch_abs_max"] for row in alone) <= 1e-4
    # A checkpoint of two ranks resumes as one process.
    resumed = train_on(1, "alone", 6, "--run.resume=true")
    close(train_on(1, "ranks", 6, "--run.resume=true"), resumed)


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_resumes_on_three(train_on: Callable[..., list[dict[str, float]]]) -> None:
    train_on(1, "alone", 4)
    train_on(2, "ranks", 4)
    close(train_on(3, "ranks", 6, "--run.resume=true"), train_on(1, "alone", 6, "--run.resume=true"))


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    done = ranks(2, "train", str(tmp_path / "nowhere.toml"))
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    (told,) = (line for line in lines if line.startswith("error: "))
    assert "nowhere.toml: no such file" in told
    # torchrun's own report names the same cause, and nothing else.
    assert f"  traceback : {told}" in lines[lines.index("Root Cause (first observed failure):") :]
