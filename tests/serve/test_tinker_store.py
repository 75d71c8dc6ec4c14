"""Saved weights on disk: names in use, their time, and damaged records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest

from nmoe.serve.tinker import store as store_module
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.store import Store, expiry


def write(text: str) -> Callable[[Path], None]:
    def act(directory: Path) -> None:
        (directory / "values").write_text(text)

    return act


def save(store: Store, name: str, text: str, overwrite: bool = False, ttl: int | None = None) -> str:
    about = {"expires": expiry(ttl), "request": f"model:{text}"}
    saved = store.save("model", "weights", name, write(text), about, overwrite)
    return (saved.directory / "values").read_text()


def test_weights_are_replaced_if_the_client_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert save(store, "one", "first") == "first"
    with pytest.raises(
        TinkerError, match="there are weights at tinker://model/weights/one; choose another name, or set"
    ):
        save(store, "one", "second")
    assert (store.find("tinker://model/weights/one").directory / "values").read_text() == "first"
    assert save(store, "one", "third", overwrite=True) == "third"
    assert [one.name for one in store.saved("model")] == ["one"]
    assert sorted(file.name for file in (tmp_path / "model" / "weights").iterdir()) == ["one"]


def test_weights_expire(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, "short", "first", ttl=0), save(store, "long", "first", ttl=3600), save(store, "kept", "first")
    assert {one.name for one in store.saved("model")} == {"long", "kept"}
    with pytest.raises(TinkerError, match="there are no weights"):
        store.find("tinker://model/weights/short")
    store.expire()
    assert sorted(file.name for file in (tmp_path / "model" / "weights").iterdir()) == ["kept", "long"]
    assert store.find("tinker://model/weights/long").described()["expires_at"] > expiry(3500)
    assert store.find("tinker://model/weights/kept").described()["expires_at"] is None
    save(store, "short", "again", ttl=0)
    assert save(store, "short", "third") == "third", "its name is free"


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("good", "torn", "empty"):
        store.note_run(name, {"time": "now", "rank": 4})
    (tmp_path / "torn" / "run.json").write_text('{"time": "no')
    (tmp_path / "empty" / "run.json").write_text("")
    assert list(store.runs()) == [("good", {"time": "now", "rank": 4})]
    with pytest.raises(TinkerError, match="there is no training run 'torn'"):
        store.run("torn")
    save(store, "one", "first")
    save(store, "two", "first")
    (tmp_path / "model" / "weights" / "one" / "tinker.json").write_text("{")
    assert [one.name for one in store.saved("model")] == ["two"]
    assert save(store, "one", "second") == "second"


def test_a_request_that_comes_again_finds_what_it_saved(tmp_path: Path) -> None:
    """A server that was killed had saved the weights, and not noted that it had."""
    store = Store(tmp_path)
    save(store, "one", "first")
    (tmp_path / "model" / "weights" / "one" / "values").write_text("as it was saved")
    assert save(store, "one", "first") == "as it was saved"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_save_that_was_killed_leaves_weights_of_its_name_alone(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renames the weights that it replaces, and then its own: before, between and after."""
    store, rename, done = Store(tmp_path), Path.rename, count()
    save(store, "one", "first")

    def killed(self: Path, target: Path) -> Path:
        if next(done) == renames:
            raise SystemExit
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        patched.setattr(store_module.shutil, "rmtree", lambda *_, **__: None)  # the killed process removes nothing
        with pytest.raises(SystemExit) if renames < 2 else nullcontext():
            save(store, "one", "second", overwrite=True)
    again = Store(tmp_path)
    again.mend()
    assert [file.name for file in (tmp_path / "model" / "weights").iterdir()] == ["one"]
    whole = (again.find("tinker://model/weights/one").directory / "values").read_text()
    assert whole == ("second" if renames == 2 else "first")


def test_weights_that_were_being_removed_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    save(store, "one", "first")
    with monkeypatch.context() as patched:
        patched.setattr(store_module.shutil, "rmtree", lambda *_, **__: None)
        store.delete("tinker://model/weights/one")
    assert store.saved("model") == []
    Store(tmp_path).mend()
    assert list((tmp_path / "model" / "weights").iterdir()) == []
