"""A directory that appears when it is whole: by one process at a time, and without a trace of one that failed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe.errors import StorageError, UserError
from nmoe.runs.whole import whole_directory

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
        "import sys; from pathlib import Path; from nmoe.runs.whole import whole_directory\n"
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
