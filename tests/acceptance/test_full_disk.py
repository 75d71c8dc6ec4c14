"""A disk without room for the next checkpoint: exit code 2, the earlier checkpoint whole, and the run goes on with room."""

from __future__ import annotations

import resource
import shlex
import subprocess
from pathlib import Path

import pytest
from command_line import NMOE

from nmoe.runs.checkpoint import latest_checkpoint, verify_checkpoint
from nmoe.runs.ledger import read_metrics

PRIVATE_MOUNTS = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c"]


def run_of(workshop: Path, directory: Path) -> list[str]:
    """A run of three steps that keeps a checkpoint of each."""
    overrides = [
        "--run.steps=3",
        "--optimizer.warmup_steps=2",
        "--checkpoint.every_steps=1",
        "--checkpoint.keep=3",
        "--eval=[]",
    ]
    return [*NMOE, "pretrain", f"{workshop}/base.toml", f"--run.directory={directory}", *overrides]


def test_a_full_disk(workshop: Path, base: Path, tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    checkpoint = latest_checkpoint(base / "checkpoints")
    assert checkpoint is not None
    room = int(1.6 * sum(file.stat().st_size for file in checkpoint.iterdir()))  # for one checkpoint and a half
    mount = f"mount -t tmpfs -o size={room} tmpfs '{disk}'"
    if subprocess.run([*PRIVATE_MOUNTS, mount], capture_output=True, check=False).returncode:
        pytest.skip("no user may mount a tmpfs here")
    command = shlex.join(run_of(workshop, disk))
    script = f"""
{mount} || exit 9
{command}
echo "code $?"
cp -r '{disk}' '{kept}'
mount -o remount,size=100m '{disk}' || exit 9
{command} --run.resume=true
echo "code $?"
cp -r '{disk}/base' '{kept}/resumed'
"""
    done = subprocess.run([*PRIVATE_MOUNTS, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == ["code 2", "code 0"]
    assert done.stderr.startswith(f"error: {disk}/base/checkpoints/step_000002: not written, since a checkpoint takes ")
    assert "are free on its disk. The run ends here; its newest checkpoint, step_000001, is whole." in done.stderr
    assert "--run.resume=true" in done.stderr
    assert done.stderr.count("\n") == 1
    left = kept / "base" / "checkpoints"
    assert sorted(path.name for path in left.iterdir()) == ["latest", "step_000001"]
    verify_checkpoint(left / "step_000001")
    assert "resumed from step 1" in done.stdout
    resumed = kept / "resumed"
    assert [row["step"] for row in read_metrics(resumed)] == [1, 2, 3]
    for step in (1, 2, 3):
        verify_checkpoint(resumed / "checkpoints" / f"step_{step:06d}")


def test_a_file_that_may_not_grow(workshop: Path, base: Path, tmp_path: Path) -> None:
    """A limit on the size of files, such as a batch system sets, stops the writers that are not Python too."""
    limit = 100_000

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(run_of(workshop, tmp_path), preexec_fn=bounded, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert done.stderr.startswith(f"error: {tmp_path}/base/checkpoints/step_000001: cannot be written: ")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "base" / "checkpoints").iterdir()) == []
