"""Pools of dataset records: every layout a file or a local copy can have, and the error for every kind of broken data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nmoe.envs.pools import Pool
from nmoe.errors import UserError
from nmoe.types import Problem

MakePool = Callable[..., Pool]

GSM8K_KEYS = {
    "task_type": "gsm8k",
    "problem_field": "question",
    "answer_field": "answer",
    "gold_extractor": "gsm8k_hash",
}
GSM8K = [{"question": f"What is {i} + {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i:,}"} for i in range(600, 605)]
MATH_KEYS = {"task_type": "math", "problem_field": "problem", "answer_field": "solution", "gold_extractor": "boxed"}
MATH = [
    {
        "problem": f"Halve {i}.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": rf"It is $\boxed{{\frac{{{i}}}{{2}}}}$.",
    }
    for i in range(3)
]


def write_jsonl(path: Path, records: Iterable[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what the datasets library converts out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delenv("NMOE_DATASETS", raising=False)


def questions(problems: Iterable[Problem]) -> list[str]:
    return [problem.question for problem in problems]


def jsonl_pool(directory: Path) -> dict[str, Any]:
    return {"type": "jsonl", "path": write_jsonl(directory / "gsm8k.jsonl", GSM8K), **GSM8K_KEYS}


def parquet_pool(directory: Path) -> dict[str, Any]:
    path = directory / "gsm8k.parquet"
    pq.write_table(pa.Table.from_pylist(GSM8K), path, row_group_size=2)
    return {"type": "parquet", "path": str(path), **GSM8K_KEYS}


def hf_file_pool(directory: Path) -> dict[str, Any]:
    return {"type": "hf", "dataset": write_jsonl(directory / "gsm8k.jsonl", GSM8K), "split": "test", **GSM8K_KEYS}


def hf_json_pool(directory: Path) -> dict[str, Any]:
    path = directory / "gsm8k.json"
    path.write_text(json.dumps(GSM8K))
    return {"type": "hf", "dataset": str(path), **GSM8K_KEYS}


def hf_csv_pool(directory: Path) -> dict[str, Any]:
    path = directory / "gsm8k.csv"
    datasets.Dataset.from_list(GSM8K).to_csv(path)
    return {"type": "hf", "dataset": str(path), **GSM8K_KEYS}


def hf_directory_pool(directory: Path) -> dict[str, Any]:
    """A directory as `hub download` leaves it: subsets below, declared in the README."""
    root = directory / "gsm8k"
    for subset in ("main", "socratic"):
        (root / subset).mkdir(parents=True)
        for split, records in (("train", GSM8K), ("test", GSM8K[:1])):
            rows = records if subset == "main" else records[:2]
            pq.write_table(pa.Table.from_pylist(rows), root / subset / f"{split}-00000-of-00001.parquet")
    configs = "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {subset}/{split}-*\n" for split in ("train", "test"))
        for subset in ("main", "socratic")
    )
    (root / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return {"type": "hf", "dataset": str(root), "subset": "main", "split": "train", **GSM8K_KEYS}


def hf_undeclared_pool(directory: Path) -> dict[str, Any]:
    """The same without a README: the subset is a directory."""
    pool = hf_directory_pool(directory)
    (Path(pool["dataset"]) / "README.md").unlink()
    return pool


def hf_flat_pool(directory: Path) -> dict[str, Any]:
    """One file per split, and a subset named that the copy does not tell apart."""
    write_jsonl(directory / "flat" / "train.jsonl", GSM8K)
    write_jsonl(directory / "flat" / "test.jsonl", GSM8K[:1])
    return {"type": "hf", "dataset": str(directory / "flat"), "subset": "main", **GSM8K_KEYS}


def hf_saved_pool(directory: Path) -> dict[str, Any]:
    datasets.Dataset.from_list(GSM8K).save_to_disk(directory / "saved")
    return {"type": "hf", "dataset": str(directory / "saved"), "subset": "main", **GSM8K_KEYS}


def hf_saved_splits_pool(directory: Path) -> dict[str, Any]:
    splits = {"train": GSM8K[:3], "test": GSM8K[3:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    saved.save_to_disk(directory / "saved_splits")
    return {"type": "hf", "dataset": str(directory / "saved_splits"), "split": "train+test", **GSM8K_KEYS}


def parquet_files_pool(directory: Path) -> dict[str, Any]:
    for number, rows in enumerate((GSM8K[:2], GSM8K[2:3], GSM8K[3:])):
        pq.write_table(pa.Table.from_pylist(rows), directory / f"part-{number}.parquet")
    return {"type": "parquet", "path": str(directory / "part-*.parquet"), **GSM8K_KEYS}


def jsonl_files_pool(directory: Path) -> dict[str, Any]:
    write_jsonl(directory / "part-0.jsonl", GSM8K[:4])
    write_jsonl(directory / "part-1.jsonl", GSM8K[4:])
    return {"type": "jsonl", "path": str(directory / "part-?.jsonl"), **GSM8K_KEYS}


@pytest.mark.parametrize(
    "layout",
    [
        jsonl_pool,
        jsonl_files_pool,
        parquet_pool,
        parquet_files_pool,
        hf_file_pool,
        hf_json_pool,
        hf_csv_pool,
        hf_directory_pool,
        hf_undeclared_pool,
        hf_flat_pool,
        hf_saved_pool,
        hf_saved_splits_pool,
    ],
)
def test_every_layout_gives_the_same_problems(
    make_pool: MakePool, layout: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    pool = make_pool(layout(tmp_path))
    assert pool.size == 5
    problems = sorted(pool.take(5), key=lambda problem: problem.id)
    assert questions(problems) == [record["question"] for record in GSM8K]
    assert [problem.gold for problem in problems] == ["1,200", "1,202", "1,204", "1,206", "1,208"]
    assert [problem.id for problem in problems] == [f"demo/{index}" for index in range(5)]
    assert [problem.metadata for problem in problems] == [{"record": index} for index in range(5)]
    # The same content in the same order is the same pool, wherever it lies.
    assert pool.state()["fingerprint"] == make_pool(jsonl_pool(tmp_path)).state()["fingerprint"]


def test_slices_and_max_examples_take_the_first_records(make_pool: MakePool, tmp_path: Path) -> None:
    for pool in (
        {**hf_flat_pool(tmp_path / "a"), "split": "train[:2]"},
        {**hf_file_pool(tmp_path / "b"), "split": "test[:2]"},
        {**hf_saved_splits_pool(tmp_path / "c"), "split": "train[:2]"},
        {**hf_saved_pool(tmp_path / "d"), "split": "train[:40%]"},
        {**hf_flat_pool(tmp_path / "e"), "max_examples": 2},
        {**jsonl_pool(tmp_path / "f"), "max_examples": 2},
    ):
        assert sorted(questions(make_pool(pool).take(2))) == ["What is 600 + 600?", "What is 601 + 601?"]
    assert make_pool({**jsonl_pool(tmp_path), "max_examples": 100_000}).size == 5


def test_csv_answers_stay_texts(make_pool: MakePool, tmp_path: Path) -> None:
    path = tmp_path / "sort.csv"
    path.write_text("problem,answer\nSort: 5310,0135\nSort: 21,12\n")
    pool = make_pool({"type": "hf", "dataset": str(path), "task_type": "sort"})
    assert {problem.gold for problem in pool.take(2)} == {"0135", "12"}


def test_the_documented_names_work_with_local_copies(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "copies/openai/gsm8k/main/train.jsonl", GSM8K)
    write_jsonl(tmp_path / "copies/hendrycks/competition_math/train.jsonl", MATH)
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "copies"))
    pool = make_pool(
        {
            "type": "mixture",
            "seed": 0,
            "sources": [
                {
                    "name": "gsm8k",
                    "type": "hf",
                    "dataset": "openai/gsm8k",
                    "subset": "main",
                    "split": "train",
                    **GSM8K_KEYS,
                    "weight": 0.3,
                    "max_examples": 100000,
                },
                {
                    "name": "math",
                    "type": "hf",
                    "dataset": "hendrycks/competition_math",
                    "split": "train",
                    **MATH_KEYS,
                    "weight": 0.7,
                    "max_examples": 100000,
                },
            ],
        }
    )
    problems = pool.take(100)
    assert sum(problem.source == "gsm8k" for problem in problems) == pytest.approx(30, abs=3)
    assert {problem.gold for problem in problems if problem.source == "math"} == {
        rf"\frac{{{i}}}{{2}}" for i in range(3)
    }
    assert {problem.id for problem in problems} == {f"gsm8k/{i}" for i in range(5)} | {f"math/{i}" for i in range(3)}


GOOD = json.dumps(GSM8K[0]).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"question": "?", "answer": }', "not JSON: Expecting value"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'["question"]', "an array, not an object"),
        (b"3", "a number, not an object"),
        (b'{"question": "?"}', "no field 'answer'; the fields are 'question': set answer_field"),
        (b"{}", "the fields are none: set problem_field"),
        (b'{"question": 3, "answer": "#### 3"}', "field 'question' holds the number 3, not text; write it as a string"),
        (b'{"question": "?", "answer": null}', "field 'answer' is null; fill it in"),
        (b'{"question": " ", "answer": "#### 3"}', "field 'question' is empty"),
        (b'{"question": "\\ud800", "answer": "#### 3"}', "lone surrogate"),
        (b'{"question": "?", "answer": "3"}', "gold_extractor = 'gsm8k_hash' finds no"),
        (b'{"question": "?", "answer": "#### three"}', "is a number, not 'three'"),
    ],
)
def test_a_broken_line_is_named(make_pool: MakePool, line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\n\n" + line + b"\n")
    pool = {"type": "jsonl", "path": str(path), **GSM8K_KEYS}
    with pytest.raises(UserError, match=reason) as caught:
        make_pool(pool)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert len(str(caught.value)) < 500
    assert make_pool({**pool, "max_examples": 1}).size == 1


def test_a_broken_row_is_named(make_pool: MakePool, tmp_path: Path) -> None:
    path = tmp_path / "broken.parquet"
    pool = {"type": "parquet", "path": str(path), **GSM8K_KEYS}
    pq.write_table(pa.Table.from_pylist([*GSM8K, {"question": "?", "answer": None}]), path, row_group_size=2)
    with pytest.raises(UserError, match=rf"{path}: row 6: field 'answer' is null"):
        make_pool(pool)
    with pytest.raises(UserError, match=r"broken.parquet: no column 'prompt'; the columns are 'question', 'answer'"):
        make_pool({**pool, "problem_field": "prompt"})
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"broken.parquet: cannot be read as Parquet after row 0"):
        make_pool(pool)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_is_not_there(make_pool: MakePool, kind: str, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match=rf"^{path}: cannot be read"):
            make_pool({"type": kind, "path": str(path), **GSM8K_KEYS})


def test_an_empty_pool_is_an_error(make_pool: MakePool, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records; a task pool needs at least one problem"):
        make_pool({"type": "jsonl", "path": write_jsonl(tmp_path / "empty.jsonl", []), **GSM8K_KEYS})
    with pytest.raises(UserError, match="corresponds to no data"):
        make_pool({**hf_flat_pool(tmp_path), "split": "train[5:]"})


def test_a_broken_row_of_a_dataset_is_named(make_pool: MakePool, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [*GSM8K, {"question": "?", "answer": "3"}])
    with pytest.raises(UserError, match=rf"{path}:6: gold_extractor = 'gsm8k_hash'"):
        make_pool({"type": "hf", "dataset": path, **GSM8K_KEYS})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"split": "validation"}, "the local copy .* cannot be loaded: .*validation"),
        ({"split": "train[:"}, "cannot be loaded"),
        ({"subset": "absent"}, "subset 'absent', split 'train': the local copy .*absent"),
        ({"problem_field": "problem"}, "no field 'problem'; the fields are 'question', 'answer': set problem_field"),
    ],
)
def test_what_a_local_copy_lacks_is_named(
    make_pool: MakePool, changes: dict[str, str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        make_pool({**hf_directory_pool(tmp_path), **changes})


def test_a_local_file_of_another_kind(make_pool: MakePool, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("?")
    with pytest.raises(UserError, match=r"files of type '.txt' are not read; .jsonl, .json, .parquet, .csv are"):
        make_pool({"type": "hf", "dataset": str(tmp_path / "data.txt"), **GSM8K_KEYS})
    (tmp_path / "data.json").write_text('[{"question": ')
    with pytest.raises(UserError, match=r"data.json: not JSON: Expecting value"):
        make_pool({"type": "hf", "dataset": str(tmp_path / "data.json"), **GSM8K_KEYS})


def test_a_hub_name_without_a_network(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, subset: str | None, *, split: str) -> None:
        assert (name, subset, split) == ("openai/gsm8k", "main", "train")
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError) as caught:
        make_pool({"type": "hf", "dataset": "openai/gsm8k", "subset": "main", **GSM8K_KEYS})
    for part in ("'openai/gsm8k', subset 'main'", "Couldn't reach", "path of a local copy", "$NMOE_DATASETS"):
        assert part in str(caught.value)
