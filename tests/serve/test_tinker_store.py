"""Saved weights on disk: names in use, their time, and damaged records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.store import Store, expiry


def write(text: str) -> Callable[[Path], None]:
    def act(directory: Path) -> None:
        (directory / "values").write_text(text)

    return act


def save(store: Store, name: str, text: str, overwrite: bool = False, ttl: int | None = None) -> str:
    saved = store.save("model", "weights", name, write(text), {"expires": expiry(ttl)}, overwrite)
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


def test_values_of_processes_that_ended_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".samplers-killed"
    left.mkdir()
    (left / "values-1").write_text("many bytes")
    one, other = Store(tmp_path).own_directory(), Store(tmp_path).own_directory()
    assert not left.exists()
    assert one.exists(), "its process runs"
    assert other != one
