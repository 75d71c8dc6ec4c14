"""Whole writes, and full disks told from other errors: raised by hand, and met for real on a small tmpfs."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from nmoe.errors import StorageError
from nmoe.runs.storage import append_whole, make_directory, remove_partials, storage_errors, write_atomically


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EROFS, "Read-only file system"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
    ],
)
def test_storage_refusals_become_storage_errors(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "absent" / "model.safetensors"
    message = r"model\.safetensors: cannot be written: .*bytes free"
    with pytest.raises(StorageError, match=message) as caught, storage_errors(path):
        raise error
    assert caught.value.exit_code == 1
    assert caught.value.__cause__ is error


def test_a_full_disk_is_found_behind_the_error_it_led_to(tmp_path: Path) -> None:
    def save() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("could not save") from error

    with pytest.raises(StorageError, match="No space left on device"), storage_errors(tmp_path):
        save()


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), RuntimeError("shapes differ"), KeyError()])
def test_other_errors_pass_unchanged(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, storage_errors(tmp_path):
        raise error
    assert caught.value is error


def test_write_atomically_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["config.toml"]


def test_remove_partials_takes_only_what_a_kill_left(tmp_path: Path) -> None:
    for name in (".config.toml.partial", ".lock", "config.toml"):
        (tmp_path / name).touch()
    remove_partials(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", "config.toml"]


def test_full_disk_leaves_the_earlier_content(
    tmp_path: Path, small_disk: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    code = """
import os, sys
from pathlib import Path
from nmoe.errors import StorageError
from nmoe.runs.storage import append_whole, write_atomically

disk = Path(sys.argv[1])
append_whole(disk / "lines", b"first\\n")
write_atomically(disk / "whole", b"first")
for write, name in ((append_whole, "lines"), (write_atomically, "whole")):
    try:
        write(disk / name, b"x" * 2**21)
    except StorageError as error:
        print(error)
print((disk / "lines").read_bytes(), (disk / "whole").read_bytes(), sorted(os.listdir(disk)))
"""
    done = small_disk(code)
    assert done.stderr == ""
    first, second, state = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path}/disk/lines: cannot be written: No space left on device (")
    assert second.startswith(f"{tmp_path}/disk/whole: cannot be written: No space left on device (")
    assert state == "b'first\\n' b'first' ['lines', 'whole']"


def test_append_whole_appends(tmp_path: Path) -> None:
    append_whole(tmp_path / "lines", b"a\n")
    append_whole(tmp_path / "lines", b"b\n")
    assert (tmp_path / "lines").read_bytes() == b"a\nb\n"


def test_a_directory_that_the_disk_refuses_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"evals: cannot be written: Read-only file system; .*, or choose another$"):
        make_directory(tmp_path / "evals", "choose another")
