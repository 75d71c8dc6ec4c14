"""Saving and restoring the state of a run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe.errors import StorageError, UserError
from nmoe.model.snapshot import Snapshot
from nmoe.runs.checkpoint import (
    Saver,
    checkpoint_step,
    latest_checkpoint,
    refuse_without_room,
    remove_leftovers,
    verify_checkpoint,
)
from nmoe.runs.state import Files, JsonPart, Part, Subdirectory, load_parts, saved_version, snapshot_parts


class Counter:
    """A part that counts. `before_writing` runs where its file is about to be written."""

    def __init__(self, before_writing: Callable[[], object] = lambda: None, size: int = 8) -> None:
        self.value, self.copied, self._before, self._size = 0, list[bool](), before_writing, size

    def snapshot(self, copied: bool) -> Snapshot:
        value = self.value
        self.copied.append(copied)

        def write(directory: Path) -> None:
            self._before()
            (directory / "count").write_text(str(value))

        return Snapshot(write, self._size)

    def load(self, directory: Path, state: None) -> None:
        self.value = int((directory / "count").read_text())


def saved(checkpoint: Path) -> int:
    counter = Counter()
    load_parts(checkpoint, {"counter": counter})
    return counter.value


def test_training_goes_on_during_a_save_and_does_not_reach_it(tmp_path: Path) -> None:
    trained = threading.Event()
    counter = Counter(lambda: trained.wait(30))
    with Saver(tmp_path, keep=2) as saver:
        counter.value = 5
        saver.save(5, {"counter": counter}, best=True)
        counter.value = 6  # the writer has not begun
        saver.check()
        assert not (tmp_path / "latest").exists()
        assert not (tmp_path / "best").exists()
        trained.set()
    assert saved(tmp_path / "step_000005") == 5
    assert checkpoint_step(tmp_path / "latest") == checkpoint_step(tmp_path / "best") == 5
    assert counter.copied == [True]
    verify_checkpoint(tmp_path / "latest")


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    writing: list[int] = []
    most = 0

    def wait() -> None:
        nonlocal most
        writing.append(1)
        most = max(most, len(writing))
        threading.Event().wait(0.05)
        writing.pop()

    counter = Counter(wait)
    with Saver(tmp_path, keep=9) as saver:
        for step in (1, 2, 3):
            counter.value = step
            saver.save(step, {"counter": counter})
    assert most == 1
    assert [saved(tmp_path / f"step_00000{step}") for step in (1, 2, 3)] == [1, 2, 3]


def test_a_save_that_is_waited_for_copies_nothing_and_is_there(tmp_path: Path) -> None:
    counter = Counter()
    with Saver(tmp_path, keep=1, asynchronous=False) as saver:
        saver.save(1, {"counter": counter})
        assert latest_checkpoint(tmp_path) == tmp_path / "step_000001"
    assert counter.copied == [False]


def test_the_writers_error_comes_back_once_at_the_next_look(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError(errno.EIO, "Input/output error")

    saver = Saver(tmp_path, keep=1)
    with saver:
        saver.save(1, {"counter": Counter()})
        saver.save(2, {"counter": Counter(refuse)})
        with pytest.raises(StorageError, match=r"step_000002: cannot be written: Input/output error"):
            saver.wait()
        saver.check()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000001"]
    with pytest.raises(StorageError, match="step_000003"), saver:
        saver.save(3, {"counter": Counter(refuse)})
    with pytest.raises(RuntimeError, match="the run's own"), saver:  # noqa: PT012 (the save before is part of it)
        saver.save(4, {"counter": Counter(refuse)})
        raise RuntimeError("the run's own")


def test_a_kill_during_the_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        saver = Saver(tmp_path, keep=1)
        saver.save(1, {"counter": Counter()})
        saver.wait()

        def stall() -> None:
            os.write(writing, b"x")
            threading.Event().wait(60)

        saver.save(2, {"counter": Counter(stall)}, best=True)
        saver.wait()
        os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    os.close(reading)
    assert sorted(os.listdir(tmp_path)) == [".step_000002.partial", "latest", "step_000001"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000001"
    verify_checkpoint(tmp_path / "latest")
    remove_leftovers(tmp_path)  # as the next start does
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000001"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    parts: dict[str, Part] = {"counter": Counter(size=1000)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(999))
    with Saver(tmp_path, keep=1) as saver:
        with pytest.raises(
            UserError,
            match=r"step_000001: not written, since a checkpoint takes 1,000 bytes and 999 are free .* has no checkpoint yet",
        ) as caught:
            saver.save(1, parts)
        assert caught.value.exit_code == 2
        assert os.listdir(tmp_path) == []
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
        saver.save(1, parts)
        saver.wait()
    # The small files beside the tensors count as well, once a checkpoint tells how many bytes they have.
    (tmp_path / "step_000001" / "tokenizer.json").write_text("x" * 2000)
    with pytest.raises(UserError, match=r"takes 2,\d\d\d bytes and 1,000 are free .* step_000001, is whole"):
        refuse_without_room(tmp_path, 2, 1000)


def test_parts_that_a_killed_save_left_make_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".parts_step_000001.learner"
    left.mkdir()
    (left / "part").write_bytes(b"x")
    monkeypatch.setattr("nmoe.runs.checkpoint.bytes_free", lambda directory: 0 if left.exists() else 1000)
    with Saver(tmp_path, keep=2) as saver:
        saver.save(2, {"counter": Counter(size=1000)})
    assert saved(tmp_path / "step_000002") == 0
    assert not left.exists()


def test_weights_go_elsewhere_too_without_what_only_a_resumption_needs(tmp_path: Path) -> None:
    own, exports = tmp_path / "run", tmp_path / "other disk" / "exports"

    def write(directory: Path) -> None:
        for name in ("model.safetensors", "tokenizer.json", "optimizer.safetensors", "optimizer.json"):
            (directory / name).write_text(name)
        (directory / "critic").mkdir()
        (directory / "critic" / "optimizer.json").write_text("{}")

    class Model(Counter):
        def snapshot(self, copied: bool) -> Snapshot:
            return Snapshot(write, 8, {"version": 3})

    with Saver(own, keep=1, exports=exports) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"learner": Model()}, best=step == 1)
    assert sorted(os.listdir(exports)) == ["best", "latest", "step_000001", "step_000003"]
    assert sorted(os.listdir(exports / "latest")) == ["critic", "manifest.json", "model.safetensors", "tokenizer.json"]
    assert os.listdir(exports / "latest" / "critic") == []
    verify_checkpoint(exports / "latest")
    assert (own / "latest" / "optimizer.json").exists()
    # A kill between the checkpoint, its mark and its export: the next start makes up for it, once.
    shutil.rmtree(exports / "step_000003")
    saver = Saver(own, keep=1, exports=exports)
    saver.resume(own / "step_000003", best=3)
    assert os.readlink(own / "best") == os.readlink(exports / "best") == "step_000003"
    made = (exports / "step_000003").stat().st_ino
    saver.resume(own / "step_000003", best=3)
    assert (exports / "step_000003").stat().st_ino == made
    with pytest.raises(UserError, match=r"choose another checkpoint\.export_directory"):
        Saver(own, keep=1, exports=own / "latest" / "optimizer.json")


def test_the_links_of_a_resumed_run_name_its_last_and_its_best_checkpoint(tmp_path: Path) -> None:
    own, exports = tmp_path / "run", tmp_path / "exports"

    def links() -> dict[str, list[str]]:
        return {name: [os.readlink(place / name) for place in (own, exports)] for name in ("latest", "best")}

    saver = Saver(own, keep=1, asynchronous=False, exports=exports)
    for step in (1, 2):
        saver.save(step, {"counter": Counter()}, best=step == 1)
    # Killed between the export of a best checkpoint and its mark.
    saver.resume(own / "step_000002", best=2)
    assert links() == {"latest": ["step_000002"] * 2, "best": ["step_000002"] * 2}
    # Rolled back by its user, who removed the later checkpoint, and the export of the one before.
    saver.save(3, {"counter": Counter()}, best=True)
    saver.save(4, {"counter": Counter()})
    shutil.rmtree(own / "step_000004")
    shutil.rmtree(exports / "step_000003")
    saver.resume(own / "step_000003", best=3)
    assert links() == {"latest": ["step_000003"] * 2, "best": ["step_000003"] * 2}
    # Another directory for exports gets both, though it keeps one beside the best.
    saver.save(5, {"counter": Counter()})
    Saver(own, keep=1, asynchronous=False, exports=tmp_path / "new").resume(own / "step_000005", best=3)
    assert sorted(os.listdir(tmp_path / "new")) == ["best", "latest", "step_000003", "step_000005"]
    assert (os.readlink(tmp_path / "new/best"), os.readlink(tmp_path / "new/latest")) == ("step_000003", "step_000005")
    # The best was removed: no other takes its name.
    saver.resume(own / "step_000005", best=1)
    assert links()["best"] == ["step_000003"] * 2
    saver.resume(own / "step_000005", best=None)
    assert links() == {"latest": ["step_000005"] * 2, "best": ["step_000003"] * 2}


class Weights:
    """A part with a file and a version."""

    def __init__(self, weight: str, version: int) -> None:
        self.weight, self.version = weight, version

    def snapshot(self, copied: bool) -> Snapshot:
        weight = self.weight
        return Snapshot(
            lambda directory: (directory / "weights").write_text(weight) and None, 4, {"version": self.version}
        )

    def load(self, directory: Path, state: Any) -> None:
        self.weight = (directory / "weights").read_text()
        if state is not None:
            self.version = state["version"]


def parts(policy: Weights, critic: Weights, place: dict[str, int]) -> dict[str, Any]:
    return {
        "learner": policy,
        "tokenizer": Files(lambda directory: (directory / "vocabulary").write_text("a b") and None),
        "critic": Subdirectory("critic", {"learner": critic}),
        "place": JsonPart(lambda: place, place.update),
    }


def test_parts_come_back_as_they_were(tmp_path: Path) -> None:
    place = {"at": 7}
    taken = snapshot_parts(parts(Weights("p", 3), Weights("c", 5), place), copied=True)
    place["at"] = 8  # what happens between the snapshot and its writing is not in it
    assert taken.size == 8
    taken.write(tmp_path)
    assert json.loads((tmp_path / "state.json").read_text()) == {"learner": {"version": 3}, "place": {"at": 7}}
    assert (tmp_path / "vocabulary").read_text() == "a b"
    policy, critic, place = Weights("", 0), Weights("", 0), {"at": 0}
    load_parts(tmp_path, parts(policy, critic, place))
    assert (policy.weight, policy.version, critic.weight, critic.version, place) == ("p", 3, "c", 5, {"at": 7})
    assert (saved_version(tmp_path), saved_version(tmp_path / "critic")) == (3, 5)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    snapshot_parts({"learner": Weights("p", 1)}, copied=False).write(tmp_path)
    with pytest.raises(
        UserError, match=r"state\.json: holds nothing of this run's focus; .* settings and the version of"
    ):
        load_parts(tmp_path, {"learner": Weights("", 0), "focus": JsonPart(dict, lambda state: None)})
