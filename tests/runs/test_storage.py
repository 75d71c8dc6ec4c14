"""Whole writes and whole directories, and full disks told from other errors: raised by hand, and met for real on a small tmpfs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from nmoe.errors import StorageError, UserError
from nmoe.runs.storage import (
    append_whole,
    make_directory,
    remove_partials,
    storage_errors,
    whole_directory,
    write_atomically,
)


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
    assert caught.value.exit_code == 2
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


OTHER = "name another directory"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_appears_whole_with_what_was_written(tmp_path: Path) -> None:
    out = tmp_path / "models/one"
    with whole_directory(out, OTHER) as partial:
        (partial / "weights").write_text("all")
        assert not out.exists()
    assert names(out) == ["weights"]
    assert names(out.parent) == ["one"]


def test_a_failure_leaves_nothing_not_even_the_directories_above(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()

    def fail() -> None:
        with whole_directory(tmp_path / "there/models/deep/one", OTHER) as partial:
            (partial / "weights").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path / "there") == []


def test_two_processes_do_not_write_one_directory(tmp_path: Path) -> None:
    out = tmp_path / "one"
    second = (
        "import sys; from pathlib import Path; from nmoe.runs.storage import whole_directory\n"
        f"with whole_directory(Path(sys.argv[1]), {OTHER!r}) as partial: (partial / 'other').write_text('other')"
    )
    with whole_directory(out, OTHER) as partial:
        (partial / "weights").write_text("all")
        done = subprocess.run([sys.executable, "-c", second, str(out)], capture_output=True, text=True, check=False)
        assert done.stderr.splitlines()[-1].endswith(
            f"UserError: {out}: another process is writing it; wait for it to end, or {OTHER}"
        )
        assert (partial / "weights").read_text() == "all"
    assert names(out) == ["weights"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".one.partial/part").mkdir(parents=True)
    (tmp_path / ".one.partial/weights").write_text("half")
    with whole_directory(tmp_path / "one", OTHER) as partial:
        assert names(partial) == [".lock"]
    assert names(tmp_path) == ["one"]
    assert names(tmp_path / "one") == []


def test_one_that_was_finished_in_between_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "one"

    def late() -> None:
        with whole_directory(out, OTHER) as partial:
            (partial / "weights").write_text("mine")
            out.mkdir()
            (out / "weights").write_text("theirs")

    with pytest.raises(UserError, match=r"one: exists and is not an empty directory; name another"):
        late()
    assert (out / "weights").read_text() == "theirs"
    assert names(tmp_path) == ["one"]


def test_a_link_stands_for_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for name, target in (("empty", "disk"), ("new", "disk2/models")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with whole_directory(tmp_path / name, OTHER) as partial:
            (partial / "weights").write_text(name)
        assert (tmp_path / target / "weights").read_text() == name
        assert (tmp_path / name).is_symlink()


@pytest.mark.parametrize("name", ["file/one", "file/one/two"])
def test_below_a_file_none_can_be_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    refused = pytest.raises(UserError, match=rf"{name}: no directory can be made there; {OTHER}")
    with refused, whole_directory(tmp_path / name, OTHER):
        pass


def test_a_full_disk_says_nothing_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as refused, whole_directory(tmp_path / "one", OTHER):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(refused.value).endswith("Make room or permit writing there.")
    assert names(tmp_path) == []
