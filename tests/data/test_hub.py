"""Copies of hub datasets: where they are kept, that a part is never taken for the whole, and what an error says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from nmoe.data import hub
from nmoe.data.hub import download, kept_datasets, why_not_asked
from nmoe.data.prepare.source import parquet_files
from nmoe.data.rows import read_rows
from nmoe.errors import UserError


@pytest.fixture(autouse=True)
def datasets_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "kept"


def serve(monkeypatch: pytest.MonkeyPatch, files: dict[str, list[int]], fails_after: int = 99) -> list[dict[str, Any]]:
    """A hub that has these Parquet files in every repository, and fails after so many of them."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, local_dir: Path, **options: Any) -> str:
        calls.append({"name": name, **options})
        for number, (file, values) in enumerate(files.items()):
            if number == fails_after:
                raise ConnectionError("the line went dead")
            path = local_dir / file
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"text": [str(value) for value in values]}), path)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "why_not_asked", lambda: None)
    return calls


def test_a_copy_is_read_under_its_name(datasets_below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch, {"data/train-00000.parquet": [1, 2], "data/train-00001.parquet": [3]})
    assert download("some/numbers", ["*.parquet"]) == datasets_below / "some/numbers"
    assert calls == [
        {"name": "some/numbers", "repo_type": "dataset", "revision": None, "allow_patterns": ["*.parquet"]}
    ]
    assert [row["text"] for _, row in read_rows("some/numbers")] == ["1", "2", "3"]
    assert [file.name for file in parquet_files("some/numbers")] == ["train-00000.parquet", "train-00001.parquet"]
    assert len(calls) == 1, "the copy is there"


def test_a_part_is_never_taken_for_the_whole(datasets_below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"data/train-00000.parquet": [1], "data/train-00001.parquet": [2]}
    serve(monkeypatch, files, fails_after=1)
    with pytest.raises(UserError, match=r"'some/numbers'.* the line went dead; .*`nmoe data download some/numbers`"):
        download("some/numbers")
    assert not (datasets_below / "some/numbers").exists()
    serve(monkeypatch, files)
    assert sorted(path.name for path in (download("some/numbers") / "data").iterdir()) == [
        "train-00000.parquet", "train-00001.parquet",
    ]  # fmt: skip
    assert [path.name for path in (datasets_below / "some").iterdir()] == ["numbers"]


def test_a_name_is_fetched_where_no_copy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch, {"data/train-00000.parquet": [1], "data/test-00000.parquet": [2]})
    assert [file.name for file in parquet_files("some/numbers")] == ["train-00000.parquet"]
    assert [call["name"] for call in calls] == ["some/numbers"]


def test_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch, {"a.parquet": [1]})
    monkeypatch.setattr(hub, "why_not_asked", why_not_asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="did not give it: HF_HUB_OFFLINE is set; fetch it where there is a network"):
        download("some/numbers")
    assert calls == []
    assert not kept_datasets().exists(), "nothing is left behind"


@pytest.mark.parametrize("name", ["../secrets", "a/b/c", "/etc", ""])
def test_names_that_are_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch, {"a.parquet": [1]})
    with pytest.raises(UserError, match="not the name of a dataset on the hub"):
        download(name)
    assert calls == []


def test_nothing_that_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, {})
    with pytest.raises(UserError, match=r"no file on the hub matches '\*.csv'"):
        download("some/numbers", ["*.csv"])


def test_where_copies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NMOE_DATASETS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kept_datasets() == tmp_path / "cache/nmoe/datasets"
