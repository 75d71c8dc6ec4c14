"""Checkpoints: whole under their name whatever happens, kills and full disks included; pruned, linked and verified."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked
from safetensors import SafetensorError

from nmoe.errors import StorageError, UserError
from nmoe.runs.checkpoint import (
    checkpoint_step,
    latest_checkpoint,
    mark_best,
    remove_leftovers,
    save_checkpoint,
    verify_checkpoint,
)


def writer(text: str = "weights") -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_text(text)
        (directory / "optimizer").mkdir()
        (directory / "optimizer" / "state.json").write_text("{}")

    return write


def test_a_checkpoint_has_its_files_a_manifest_and_a_relative_link(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 10, writer(), keep=2)
    assert path == tmp_path / "step_000010"
    assert (path / "model.safetensors").read_text() == "weights"
    assert json.loads((path / "manifest.json").read_text()) == {
        "step": 10,
        "files": {  # from `printf weights | sha256sum` and `printf '{}' | sha256sum`
            "model.safetensors": {
                "size": 7,
                "sha256": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
            },
            "optimizer/state.json": {
                "size": 2,
                "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
            },
        },
    }
    assert os.readlink(tmp_path / "latest") == "step_000010"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000010"]
    verify_checkpoint(tmp_path / "latest")
    assert checkpoint_step(tmp_path / "latest") == 10
    assert latest_checkpoint(tmp_path) == path


def test_no_checkpoint_is_none_and_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    (tmp_path / "step_000010.bak").mkdir()
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(UserError, match=r"step_000010\.bak: not a checkpoint"):
        checkpoint_step(tmp_path / "step_000010.bak")


def test_the_last_ones_are_kept_with_latest_and_best(tmp_path: Path) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, step, writer(), keep=2)
    mark_best(tmp_path / "step_000005")
    for step in (15, 20, 1_000_000):
        save_checkpoint(tmp_path, step, writer(), keep=2)
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "step_000005", "step_000020", "step_1000000"]
    assert checkpoint_step(tmp_path / "best") == 5
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1000000"
    mark_best(tmp_path / "step_000020")
    save_checkpoint(tmp_path, 1_000_001, writer(), keep=1)
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "step_000020", "step_1000001"]


def test_keep_has_to_keep_something(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep has to be at least 1, got 0"):
        save_checkpoint(tmp_path, 1, writer(), keep=0)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writer("old"), keep=1)
    path = save_checkpoint(tmp_path, 10, writer("new"), keep=1)
    assert (path / "model.safetensors").read_text() == "new"
    verify_checkpoint(path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000010"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), StorageError),
        (RuntimeError("shapes differ"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failed_write_leaves_the_earlier_checkpoint_alone(
    tmp_path: Path, error: BaseException, raised: type[BaseException]
) -> None:
    save_checkpoint(tmp_path, 10, writer(), keep=1)

    def fail(directory: Path) -> None:
        (directory / "model.safetensors").write_text("half")
        raise error

    with pytest.raises(raised) as caught:
        save_checkpoint(tmp_path, 20, fail, keep=1)
    if raised is StorageError:
        assert str(caught.value).startswith(f"{tmp_path}/step_000020: cannot be written")
        assert "bytes free" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000010"]
    assert checkpoint_step(tmp_path / "latest") == 10


@pytest.mark.parametrize("save", ["save_file({'x': x}, d / 'm.safetensors')", "torch.save({'x': x}, d / 'm.pt')"])
def test_a_full_disk_met_for_real(
    tmp_path: Path, small_disk: Callable[[str], subprocess.CompletedProcess[str]], save: str
) -> None:
    code = f"""
import os, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from nmoe.errors import StorageError
from nmoe.runs.checkpoint import latest_checkpoint, save_checkpoint, verify_checkpoint

disk = Path(sys.argv[1])
x = torch.zeros(1000)
save_checkpoint(disk, 1, lambda d: {save}, keep=1)
x = torch.zeros(1_000_000)
try:
    save_checkpoint(disk, 2, lambda d: {save}, keep=1)
except StorageError as error:
    print(error)
verify_checkpoint(latest_checkpoint(disk))
print(sorted(os.listdir(disk)))
"""
    done = small_disk(code)
    assert done.stderr == ""
    message, state = done.stdout.splitlines()
    assert message.startswith(f"{tmp_path}/disk/step_000002: cannot be written: ")
    assert "bytes free" in message
    assert state == "['latest', 'step_000001']"


def damage(path: Path, how: str) -> None:
    file = path / "optimizer" / "state.json"
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_text("{")
    elif how == "altered":
        file.write_text("[]")
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    else:
        (path / "manifest.json").write_text('{"step": 10, "fi')


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"optimizer/state\.json: missing, though manifest\.json lists it"),
        ("cut", r"optimizer/state\.json: has 1 bytes where manifest\.json lists 2"),
        ("altered", r"optimizer/state\.json: its content is not the saved one"),
        ("no manifest", r"manifest\.json: missing"),
        ("torn manifest", r"manifest\.json: not a checkpoint's manifest"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, how: str, message: str) -> None:
    path = save_checkpoint(tmp_path, 10, writer(), keep=1)
    damage(path, how)
    with pytest.raises(UserError, match=message):
        verify_checkpoint(path)


def test_a_removal_that_is_cut_short_leaves_no_part_in_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 10, writer(), keep=1)
    remove = shutil.rmtree

    def cut_short(path: Path, ignore_errors: bool = False) -> None:
        if (path / "optimizer").exists():
            remove(path / "optimizer")
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 20, writer(), keep=1)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_000020"]
    verify_checkpoint(tmp_path / "step_000020")


def test_nothing_of_a_killed_save_gets_into_the_next(tmp_path: Path) -> None:
    (tmp_path / ".step_000010.partial").mkdir()
    (tmp_path / ".step_000010.partial" / "stale").touch()
    path = save_checkpoint(tmp_path, 10, writer(), keep=1)
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors", "optimizer"]


def test_leftovers_of_kills_are_cleared_and_a_checkpoint_moved_aside_is_put_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writer("moved aside"), keep=3)
    save_checkpoint(tmp_path, 20, writer("already replaced"), keep=3)
    (tmp_path / "step_000010").rename(tmp_path / ".step_000010.replaced")
    for name in (".step_000010.partial", ".step_000020.replaced", ".step_000005.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    (tmp_path / ".latest.link").symlink_to("step_000010")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000010", "step_000020"]
    assert (tmp_path / "step_000010" / "model.safetensors").read_text() == "moved aside"
    assert (tmp_path / "step_000020" / "model.safetensors").read_text() == "already replaced"


def save_forever() -> None:
    """Saves in a directory, every step twice: first made, then replaced."""
    directory, half_step = Path(sys.argv[1]), int(sys.argv[2])

    def write(directory: Path) -> None:
        for part in range(8):
            (directory / f"part{part}").write_bytes(bytes([part]) * 50_000)

    while True:
        half_step += 1
        save_checkpoint(directory, half_step // 2, write, keep=2)
        print("saved", flush=True)


def test_killed_at_any_moment_every_checkpoint_in_sight_is_whole(tmp_path: Path) -> None:
    step = 0
    for attempt in range(12):
        saver = Forked(tmp_path, tmp_path, str(2 * step + 1), main=f"{__name__}:save_forever")
        assert saver.line() == "saved"
        time.sleep(0.0037 * attempt)
        assert saver.poll() is None
        saver.kill()
        for path in tmp_path.glob("step_*"):
            verify_checkpoint(path)
        remove_leftovers(tmp_path)
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        verify_checkpoint(latest)
        assert checkpoint_step(latest) >= step
        step = checkpoint_step(latest)
        assert not list(tmp_path.glob(".*"))
    assert step >= 12
