"""The reader of rows: the same rows from every layout, slices as Python has them, and a place for whatever is broken."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.base import rows_of, split_path
from nmoe.data.rows import read_rows
from nmoe.errors import UserError

ROWS = [{"a": str(i), "b": 'é, "x"\nnext'} for i in range(10)]


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delenv("NMOE_DATASETS", raising=False)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n\n" for row in rows).encode()


def write(directory: Path, layout: str) -> str:
    path = directory / f"rows.{layout}"
    if layout in ("jsonl", "json"):
        path.write_bytes(lines(ROWS) if layout == "jsonl" else json.dumps(ROWS, indent=1).encode())
    elif layout == "lines.json":
        path.write_bytes(b"\xef\xbb\xbf" + lines(ROWS))
    elif layout == "jsonl.gz":
        path.write_bytes(gzip.compress(lines(ROWS)))
    elif layout == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3)
    elif layout == "csv":
        datasets.Dataset.from_list(ROWS).to_csv(path)
    elif layout == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    else:
        path.mkdir()
        (path / "train.jsonl").write_bytes(lines(ROWS))
    return str(path)


LAYOUTS = ["jsonl", "json", "lines.json", "jsonl.gz", "parquet", "csv", "saved", "directory"]


def values(rows: Iterator[tuple[str, Any]]) -> list[Any]:
    return [dict(row) for _, row in rows]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_rows_and_slices(layout: str, tmp_path: Path) -> None:
    path = write(tmp_path, layout)
    assert values(read_rows(path)) == ROWS
    for written, part in (
        ("[2:5]", slice(2, 5)),
        ("[:3]", slice(3)),
        ("[8:]", slice(8, None)),
        ("[-3:]", slice(-3, None)),
        ("[:-8]", slice(-8)),
        ("[20%:40%]", slice(2, 4)),
        ("[50%:]", slice(5, None)),
        ("[7:3]", slice(7, 3)),
        ("[5:100]", slice(5, 100)),
    ):
        assert values(read_rows(f"{path}@{written}")) == ROWS[part], written
    assert values(read_rows(f"{path}@[1:]", split="train[3:6]")) == ROWS[4:6]


@given(st.integers(0, 40), st.integers(-50, 50), st.integers(-50, 50))
def test_slices_are_those_of_python_and_percents_those_of_datasets(length: int, start: int, stop: int) -> None:
    assert list(rows_of((str(start), str(stop)), length)) == list(range(length))[start:stop]
    if 0 <= start <= stop <= 100 and length:
        spec = datasets.ReadInstruction("rows", from_=start, to=stop, unit="%")
        (expected,) = spec.to_absolute({"rows": length})
        assert rows_of((f"{start}%", f"{stop}%"), length) == range(expected.from_ or 0, expected.to)


def test_a_slice_stands_at_the_end_of_a_path_alone() -> None:
    assert split_path("a@[1:2]/b") == ("a@[1:2]/b", (None, None))
    assert split_path("a@[1]") == ("a@[1]", (None, None))
    assert split_path("a@[:5]@[1:]") == ("a@[:5]", ("1", None))


def test_places(tmp_path: Path) -> None:
    for layout, place in (
        ("jsonl", ":5"),  # blank lines are lines of the file, and no rows
        ("json", ": row 3"),
        ("parquet", ": row 3"),
        ("csv", ":7"),  # every row has a line break in it
        ("saved", ": train row 3"),
    ):
        path = write(tmp_path, layout)
        ((where, row),) = read_rows(f"{path}@[2:3]")
        assert (where, row["a"]) == (f"{path}{place}", "2")


def test_data_files_are_chosen_by_name_and_wildcard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for name in ("b-1", "b-0", "a"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"a": name}) + "\n")
    expected = [{"a": "a"}, {"a": "b-0"}, {"a": "b-1"}]
    assert values(read_rows(str(tmp_path / "data"), data_files=("a.jsonl", "b-*.jsonl"))) == expected
    monkeypatch.chdir(tmp_path)
    assert values(read_rows("json", data_files=("data/*.jsonl",))) == expected
    assert values(read_rows("json@[1:2]", data_files=("data/*.jsonl",))) == expected[1:2]
    with pytest.raises(UserError, match=r"data/c\.jsonl: no such file \(data_files = 'c\.jsonl'\)"):
        list(read_rows("data", data_files=("c.jsonl",)))


def test_files_of_a_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, subset: str | None, **options: object) -> datasets.Dataset:
        assert (name, subset, options) == ("open/data", "main", {"split": "test", "data_files": ["x.parquet"]})
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = list(read_rows("open/data@[9:]", subset="main", split="test", data_files=("x.parquet",)))
    assert rows == [("open/data: test row 10", ROWS[9])]


@pytest.mark.parametrize("name", ["trian.jsonl", "train.josnl", "data/trian.jsonl"])
def test_a_slip_of_the_hand_is_not_looked_up_on_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: object, **options: object) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(datasets, "load_dataset", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for file in ("train.jsonl", "data/train.jsonl"):
        (tmp_path / file).write_bytes(lines(ROWS))
    meant = {
        "trian.jsonl": "train.jsonl",
        "train.josnl": "train.jsonl",
        "data/trian.jsonl": "data/train.jsonl",
    }
    wanted = f"; did you mean {meant[name]!r}?"
    with pytest.raises(
        UserError, match=f"^{re.escape(name)}: cannot be read: No such file or directory{re.escape(wanted)}"
    ):
        next(iter(read_rows(name)))


def test_a_hub_name_with_a_version_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: datasets.Dataset.from_list([{"name": name}]))
    assert values(read_rows("AI-MO/NuminaMath-1.5")) == [{"name": "AI-MO/NuminaMath-1.5"}]


@pytest.mark.parametrize("name", ["openai/gsm8k", "squad"])
def test_what_lies_beside_makes_no_path_of_a_hub_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there under a similar name is named where the hub has said no, and not before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai/gsm9k").mkdir(parents=True)
    (tmp_path / "squad2").mkdir()
    there = True

    def asked(name: str, *_: object, **__: object) -> datasets.Dataset:
        if not there:
            raise datasets.exceptions.DatasetNotFoundError("no such dataset")
        return datasets.Dataset.from_list([{"name": name}])

    monkeypatch.setattr(datasets, "load_dataset", asked)
    assert values(read_rows(name)) == [{"name": name}]
    there = False
    meant = {"openai/gsm8k": "openai/gsm9k", "squad": "squad2"}[name]
    with pytest.raises(UserError, match=rf"the hub did not give it: no such dataset; .*; did you mean '{meant}'\?$"):
        list(read_rows(name))


def test_the_keys_of_other_rows_objects_are_none_of_a_rows_own(tmp_path: Path) -> None:
    rows = [{"m": [{"role": "user"}], "x": None}, {"m": [{"role": "tool", "id": "7"}], "x": {"a": 1}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    assert values(read_rows(str(tmp_path / "m.parquet"))) == rows
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert values(read_rows(str(tmp_path / "saved"))) == rows


Break = Callable[[Path], str]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', r"x\.jsonl:2: not JSON: Expecting value, column \d; each line"),
        ("x.json", b'[{"a": 1}, 3]', r"x\.json: row 2: a number, not an object"),
        ("x.json", b'[{"a": 1}', r"x\.json: not JSON: "),
        ("x.json", b"[\xff]", r"x\.json: not UTF-8"),
        ("x.csv", b"a,b\n1,2\n1\n", r"x\.csv:3: 1 fields, and the first line names 2 columns"),
        ("x.csv", b"a,b,a\n1,2,3\n", r"x\.csv:1: the column 'a' appears twice"),
        ("x.csv", b'a,b\n1,2\n"1,2\n', r"x\.csv:\d: not CSV in UTF-8: unexpected end of data"),
        ("x.csv", b"a,b\n1,\xff\n", r"x\.csv:\d: not CSV in UTF-8: "),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-9], r"x\.jsonl\.gz: cannot be read: "),
        ("x.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, r"x\.jsonl\.gz: cannot be read: Error -3"),
        ("x.jsonl.gz", b'{"a": 1}\n', r"x\.jsonl\.gz: cannot be read: Not a gzipped file"),
        ("x.txt", b"", r"x\.txt: files of type '\.txt' are not read; \.jsonl, \.json, \.parquet, \.csv are"),
    ],
)
def test_what_is_broken_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_rows(str(tmp_path / name)))


def test_a_parquet_file_whose_text_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([{"a": "a text"}]), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"a text", b"a \xffext"))
    with pytest.raises(UserError, match=r"x\.parquet: cannot be read as Parquet after row 0: 'utf-8' codec"):
        list(read_rows(str(path)))


def test_what_is_not_there(tmp_path: Path) -> None:
    for name in ("absent.jsonl", str(tmp_path / "absent"), "./absent", "a/b/c"):
        with pytest.raises(UserError, match=r"absent.* cannot be read: No such file|a/b/c: cannot be read"):
            list(read_rows(name))
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"a file has no split 'train\+test'"):
        list(read_rows(str(tmp_path / "x.jsonl"), split="train+test"))
