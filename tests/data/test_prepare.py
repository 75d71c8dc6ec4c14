"""Preparation of problems: counts by a plain reading of the rules, disjoint files, the same bytes for a seed, contamination."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmoe.config.loader import load_preparation
from nmoe.config.preparation import OWN_FILES, PreparationSettings
from nmoe.data.prepare.prepare import prepare, report
from nmoe.data.prepare.problems import Contamination, digest, ends_in_box, integer
from nmoe.data.prepare.survivors import PERCENTILES, Lengths
from nmoe.errors import UserError
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from numina_like import SCHEMA, rows, write

SMALL = {"rl_pool": 30, "sft": 12, "dev": 6, "small_pool": 5, "id_probe": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("numina")
    write(directory, 900, 3, seed=1)
    return directory


def made(source: Path | str, directory: Path, **tables: Any) -> PreparationSettings:
    settings: dict[str, Any] = {"source": {"path": str(source)}, "directory": str(directory), "splits": SMALL} | tables
    return PreparationSettings.model_validate(settings)


def read(directory: Path) -> dict[str, list[dict[str, str]]]:
    return {path.stem: [json.loads(line) for line in path.open()] for path in directory.glob("*.jsonl")}


def plain(problem: str) -> str:
    return re.sub(r"[\s$]+", "", problem.casefold())


def write_rows(path: Path, changes: list[dict[str, Any]]) -> Path:
    """A Parquet file of rows that pass every filter but for what is changed."""
    right = {
        "problem": "How many apples are there in all of the boxes?",
        "solution": r"Count them, one by one: \boxed{7}",
        "answer": "7",
        "problem_type": "Algebra",
        "question_type": "math-word-problem",
        "problem_is_valid": "Yes",
        "solution_is_valid": "Yes",
        "source": "olympiads",
        "synthetic": False,
    }
    pq.write_table(pa.Table.from_pylist([right | one for one in changes], SCHEMA), path)
    return path


def test_each_stage_counts_what_the_rules_leave(source: Path, tmp_path: Path) -> None:
    """An independent reading of the filters, one row after another, finds the same counts, lengths and problems."""
    manifest = prepare(made(source, tmp_path))
    left = list(rows(900, 1))
    lengths = []
    seen: set[str] = set()

    def is_first(row: dict[str, Any]) -> bool:
        before = len(seen)
        seen.add(plain(row["problem"]))
        return len(seen) > before

    for rule in (
        lambda row: True,
        lambda row: row["question_type"] == "math-word-problem",
        lambda row: re.fullmatch(r"-?\d+", row["answer"]),
        lambda row: row["source"] != "amc_aime",
        lambda row: row["problem_is_valid"] == row["solution_is_valid"] == "Yes" and row["solution"].strip(),
        is_first,
        lambda row: len(row["problem"].strip()) >= 20 and len(row["solution"].strip()) >= 20,
        lambda row: True,
    ):
        left = [row for row in left if rule(row)]
        lengths.append([len(row["problem"]) for row in left])
    assert [stage["rows"] for stage in manifest["stages"]] == list(map(len, lengths))
    assert len(set(map(len, lengths))) >= 4, "the rows meet the filters"
    for stage, counted in zip(manifest["stages"], lengths, strict=True):
        assert stage["prompt_chars"]["p50"] == np.percentile(counted, 50, method="inverted_cdf")
        assert stage["prompt_chars"]["max"] == max(counted)
    answers = {row["problem"]: row for row in left}
    for name, records in read(tmp_path).items():
        assert len(records) == SMALL[name]
        for record in records:
            assert record["label"] == answers[record["input"]]["answer"]
            if name in ("sft", "dev"):
                assert record["output"].endswith(f"\\boxed{{{record['label']}}}")
                body = record["output"].removesuffix(f"\\boxed{{{record['label']}}}")
                assert answers[record["input"]]["solution"].startswith(body)
            else:
                assert set(record) == {"input", "label"}


def test_a_row_for_every_filter(tmp_path: Path) -> None:
    file = write_rows(
        tmp_path / "rows.parquet",
        [
            {},
            {"problem": " how many APPLES are there  in all of the boxes? "},
            {"question_type": "proof"},
            {"problem": "Which fraction of all the apples is red?", "answer": r"\frac{1}{2}"},
            {"problem": "Which number do the contestants look for?", "answer": "notfound"},
            {"problem": "A problem of a contest that is held out.", "source": "amc_aime"},
            {"problem": "A problem that nobody could ever solve.", "problem_is_valid": "Incomplete"},
            {"problem": "A problem with a solution that is wrong.", "solution_is_valid": "No"},
            {"problem": "A problem whose solution is not there.", "solution": None},
            {"problem": "2 + 3?"},
            {"problem": "A problem with a very short solution to it.", "solution": "Seven."},
            {"problem": "A problem with thousands in the answer to it.", "answer": "$1,024$"},
        ],
    )
    splits = dict.fromkeys(SMALL, 0) | {"rl_pool": 2}
    manifest = prepare(made(file, tmp_path / "out", splits=splits))
    assert [stage["rows"] for stage in manifest["stages"]] == [12, 11, 9, 8, 5, 4, 2, 2]
    labels = {record["input"]: record["label"] for record in read(tmp_path / "out")["rl_pool"]}
    assert labels == {
        "How many apples are there in all of the boxes?": "7",
        "A problem with thousands in the answer to it.": "1024",
    }


def test_the_same_bytes_for_a_seed_and_others_for_another(source: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        prepare(made(source, tmp_path / name, seed=seed))
    contents = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "abc"]
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == sorted([*(f"{name}.jsonl" for name in SMALL), "manifest.json"])
    assert contents[0]["rl_pool.jsonl"] != contents[2]["rl_pool.jsonl"]
    manifest = json.loads(contents[0]["manifest.json"])
    for name, file in manifest["files"].items():
        assert file["sha256"] == hashlib.sha256(contents[0][name]).hexdigest()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.fixed_dictionaries({name: st.integers(0, 40) for name in OWN_FILES}),
    seed=st.integers(0, 2**63 - 1),
    probes=st.lists(st.integers(1, 10), max_size=2),
)
def test_no_problem_is_in_two_files(
    source: Path, tmp_path: Path, sizes: dict[str, int], seed: int, probes: list[int]
) -> None:
    own = [{"problem": row["problem"], "answer": row["answer"]} for row in list(rows(900, 1))[:150]]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    sizes["rl_pool"] += 1
    given = [{"path": str(tmp_path / "given.jsonl"), "name": f"p{i}", "size": size} for i, size in enumerate(probes)]
    prepare(made(source, tmp_path / "out", splits=sizes, seed=seed, probes=given))
    files = read(tmp_path / "out")
    wanted = {name: size for name, size in sizes.items() if size} | {f"p{i}": n for i, n in enumerate(probes)}
    assert {name: len(records) for name, records in files.items()} == wanted
    problems = [plain(record["input"]) for records in files.values() for record in records]
    assert len(problems) == len(set(problems))


def test_a_problem_keeps_its_file_where_others_are_added(source: Path, tmp_path: Path) -> None:
    """The draw goes by each problem's own digest."""
    prepare(made(source, tmp_path / "all", splits=dict.fromkeys(SMALL, 0) | {"rl_pool": 60}))
    first = [str(source / "train-00000-of-00003.parquet"), str(source / "train-00001-of-00003.parquet")]
    (tmp_path / "part").mkdir()
    for path in first:
        (tmp_path / "part" / Path(path).name).write_bytes(Path(path).read_bytes())
    prepare(made(tmp_path / "part", tmp_path / "two", splits=dict.fromkeys(SMALL, 0) | {"rl_pool": 60}))
    whole, two = ([record["input"] for record in read(tmp_path / name)["rl_pool"]] for name in ("all", "two"))
    kept = [problem for problem in whole if problem in set(two)]
    assert len(kept) > 20
    assert kept == [problem for problem in two if problem in set(kept)]


@pytest.mark.parametrize("action", ["remove", "report"])
def test_contamination_is_removed_or_reported(source: Path, tmp_path: Path, action: str) -> None:
    def survivors(**tables: Any) -> tuple[dict[str, Any], set[str]]:
        sizes = dict.fromkeys(SMALL, 0) | {"rl_pool": 120}
        manifest = prepare(made(source, tmp_path / "out", splits=sizes, **tables))
        return manifest, {plain(record["input"]) for record in read(tmp_path / "out")["rl_pool"]}

    _, clean = survivors()
    left = [row for row in rows(900, 1) if plain(str(row["problem"])) in clean]
    long = next(row for row in left if len(str(row["problem"]).split()) > 30)
    exact = next(row for row in left if row is not long)
    words = str(long["problem"]).split()
    evaluated = [f"Altogether new words. {' '.join(words[3:18]).upper()} and others.", f" {exact['problem']}"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in evaluated))
    sets = [{"path": str(tmp_path / "test.jsonl")}]
    manifest, after = survivors(contamination={"action": action, "sets": sets})
    counts = manifest["contamination"]["test.jsonl"]
    by_source = {str(exact["source"]): 1}
    by_source[str(long["source"])] = by_source.get(str(long["source"]), 0) + 1
    assert counts == {"problems": 2, "exact": 1, "ngram": 1, "by_source": by_source}
    hit = {plain(str(long["problem"])), plain(str(exact["problem"]))}
    assert hit & after == (set() if action == "remove" else hit)
    assert f"{action[:6]}" in "\n".join(report(manifest))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=14),
    st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=14),
    st.integers(2, 5),
)
def test_n_grams_are_those_of_a_plain_search(one: list[str], other: list[str], ngram: int) -> None:
    index = Contamination(ngram)
    index.add("set", " ".join(one))
    runs = {tuple(one[i : i + ngram]) for i in range(len(one) - ngram + 1)}
    shares = any(tuple(other[i : i + ngram]) in runs for i in range(len(other) - ngram + 1))
    problem = ", ".join(other).upper()
    same = "".join(other) + "," * max(0, len(other) - 1) == "".join(one)
    expected = {"set": "exact"} if same else {"set": "ngram"} if shares else {}
    assert index.find(problem, digest(problem)) == expected


@pytest.mark.parametrize(
    ("solution", "ending"),
    [
        (r"So \boxed{42}", r"So \boxed{42}"),
        (r"So it is $\boxed{42}$.", r"So it is \boxed{42}"),
        (r"So $$\boxed{42}$$", r"So \boxed{42}"),
        (r"So $x = \boxed{42}$.", "So $x = \\boxed{42}$.\n\n\\boxed{42}"),
        (r"First \boxed{6}, then \boxed{1,042} apples.", None),
        (r"First \boxed{6}, then \boxed{ 042} apples.", "First \\boxed{6}, then \\boxed{ 042} apples.\n\n\\boxed{42}"),
        (r"First \boxed{42}, then \boxed{\frac{1}{2}}", None),
        ("No box at all: 42", None),
    ],
)
def test_outputs_end_in_the_box(solution: str, ending: str | None) -> None:
    assert ends_in_box(solution, "42") == ending


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42", "42"), (" -007 ", "-7"), ("$1,024$", "1024"), ("-0", "0"), ("000", "0"), ("1,02", None), ("4.0", None),
        ("x = 4", None), ("", None), ("٤", None), ("1e3", None), ("--4", None),
    ],
)  # fmt: skip
def test_integers(answer: str, value: str | None) -> None:
    assert integer(answer) == value


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(1, 5))
def test_percentiles_are_numpys(lengths: list[int], parts: int) -> None:
    histogram = Lengths()
    for part in np.array_split(np.array(lengths, dtype=np.int64), parts):
        histogram.add(part)
    summary = histogram.summary()
    for percent in PERCENTILES:
        assert summary[f"p{percent:g}"] == np.percentile(lengths, percent, method="inverted_cdf")
    assert summary["max"] == max(lengths)
    assert summary["mean"] == round(sum(lengths) / len(lengths), 1)


def test_lengths_in_tokens(source: Path, tmp_path: Path) -> None:
    """Of a tokenizer whose tokens are bytes, the lengths are those of the text in UTF-8."""
    manifest = prepare(made(source, tmp_path), Tokenizer.train((), SMALLEST_VOCABULARY))
    for stage in manifest["stages"]:
        assert stage["prompt_tokens"] == stage["prompt_chars"], "the generated problems are ASCII"
    assert sum("tokens of a prompt" in line for line in report(manifest)) == len(manifest["stages"])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"splits": SMALL | {"sft": 500}}, r"of them whose solution ends in .* are left for sft, which asks for 500"),
        ({"path": "{tmp}/missing.parquet"}, "missing.parquet: no such file"),
        ({"path": "{tmp}/*.parquet"}, r"\*.parquet: no such file"),
        ({"path": "{tmp}/empty"}, "no Parquet file in this directory"),
        ({"probes": [{"path": "{tmp}/given.jsonl", "size": 3}]}, "1 different problems with an integer answer"),
        (
            {"probes": [{"path": "{tmp}/given.jsonl", "size": 1, "answer_field": "gold"}]},
            "given.jsonl:1: no text 'gold'",
        ),
        (
            {"contamination": {"sets": [{"path": "{tmp}/given.jsonl", "problem_field": "ask"}]}},
            "given.jsonl:1: no text 'ask' for the problem; the fields are 'question', 'answer'; name it in problem_field",
        ),
    ],
)
def test_bad_input_is_named(source: Path, tmp_path: Path, tables: dict[str, Any], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "given.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    filled = json.loads(json.dumps(tables).replace("{tmp}", str(tmp_path)))
    with pytest.raises(UserError, match=message):
        prepare(made(filled.pop("path", source), tmp_path / "out", **filled))
    assert not (tmp_path / "out").exists()


def test_missing_columns_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"problem": ["2 + 3?"], "answer": [5]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column 'solution', 'source', .*; the columns are 'problem', 'answer'"):
        prepare(made(tmp_path / "a.parquet", tmp_path / "out"))


def test_other_files_are_not_mixed_with(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other things than an earlier preparation"):
        prepare(made(source, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("manifest", ['{"name": "my app", "files": {"kept.txt": 1}}', '{"settings": ', "[]"])
def test_a_manifest_of_another_program_is_left_alone(source: Path, tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "kept.txt").touch()
    with pytest.raises(UserError, match="holds other things than an earlier preparation"):
        prepare(made(source, tmp_path))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"manifest.json": manifest, "kept.txt": ""}


def test_no_file_outside_of_the_directory_is_removed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(made(source, out))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["files"] |= {"../mine.txt": {}, "old.jsonl": {}}
    (out / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "mine.txt").touch()
    (out / "old.jsonl").touch()
    prepare(made(source, out))
    assert ((tmp_path / "mine.txt").exists(), (out / "old.jsonl").exists()) == (True, False)


def test_a_second_preparation_replaces_the_first(source: Path, tmp_path: Path) -> None:
    prepare(made(source, tmp_path))
    prepare(made(source, tmp_path, splits=dict.fromkeys(SMALL, 0) | {"dev": 3}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev.jsonl", "manifest.json"]


@pytest.mark.parametrize("written", range(7))
def test_one_that_is_killed_is_done_anew_over_what_it_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """Killed at each of its seven files, from the list of what it writes to the manifest, in a new directory and in a whole one."""
    prepare(made(source, tmp_path / "whole"))
    replace_ = os.replace

    def killed(settings: PreparationSettings) -> None:
        left = [None] * written

        def replace(partial: Path, path: Path) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop()
            replace_(partial, path)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                prepare(settings)

    contents = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len(contents) == 6
    for begun in ({"splits": SMALL | {"rl_pool": 29}}, {}):
        killed(made(source, tmp_path / "out", **begun))
        prepare(made(source, tmp_path / "out"))
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == contents


def test_the_packaged_preparation_has_the_guidelines_numbers() -> None:
    settings = load_preparation(Path("numina"), ["--splits.dev=7"])
    assert settings.source.path == "AI-MO/NuminaMath-1.5"
    assert settings.splits.model_dump() == {
        "rl_pool": 50_000, "sft": 5_000, "dev": 7, "small_pool": 400, "id_probe": 200,
    }  # fmt: skip
    assert (settings.seed, settings.contamination.ngram) == (42, 13)
    probes = [(probe.name, probe.path, probe.split, probe.size) for probe in settings.probes]
    assert probes == [
        ("ood_probe", "HuggingFaceH4/MATH-500", "test", 170),
        ("ood_probe", "MathArena/apex-shortlist", "train", 32),
        ("aime_18", "HuggingFaceH4/aime_2024", "train", 18),
        ("math_18", "HuggingFaceH4/MATH-500", "test", 18),
    ]
    without = settings.model_copy(update={"probes": ()})
    assert without == PreparationSettings.model_validate({"splits": {"dev": 7}}), "the file states the defaults"


# The fields of each dataset on its hub; half of the answers are no integers.
PROBED = {
    "HuggingFaceH4/MATH-500/test": ({"subject": "Algebra", "level": 5, "unique_id": "x"}, 400),
    "MathArena/apex-shortlist/train": ({"problem_idx": 1, "source": "x"}, 68),
    "HuggingFaceH4/aime_2024/train": ({"id": 60, "solution": "s", "url": "u", "year": "2024"}, 60),
}


def test_the_packaged_probes_are_drawn_from_their_datasets(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "kept"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = [f"--source.path={source}", f"--directory={tmp_path / 'out'}"]
    own += [f"--splits.{name}={size}" for name, size in SMALL.items()]
    with pytest.raises(
        UserError, match=r"nmoe data download HuggingFaceH4/MATH-500.*; with --probes=\[\] nothing is drawn"
    ):
        prepare(load_preparation(Path("numina"), own))
    for number, (name, (fields, count)) in enumerate(PROBED.items()):
        file = tmp_path / "kept" / f"{name}.jsonl"
        file.parent.mkdir(parents=True)
        lines = [
            {
                **fields,
                "problem": f"{name}: what is {n} + {number}?",
                "answer": str(n) if n % 2 else f"\\frac{{{n}}}{{7}}",
            }
            for n in range(count)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare(load_preparation(Path("numina"), own))
    files = read(tmp_path / "out")
    assert {name: len(records) for name, records in files.items()} == SMALL | {
        "ood_probe": 202,
        "aime_18": 18,
        "math_18": 18,
    }
    probes = [record for name in ("ood_probe", "aime_18", "math_18") for record in files[name]]
    assert len({record["input"] for record in probes}) == 238
    assert all(int(record["label"]) % 2 for record in probes), "of the problems with an integer answer"
    assert sum("apex-shortlist" in record["input"] for record in files["ood_probe"]) == 32
    assert all("aime_2024" in record["input"] for record in files["aime_18"])


def test_duplicates_differ_in_space_case_and_dollars_alone() -> None:
    draw = random.Random(0)
    for _ in range(50):
        text = "".join(draw.choices("ab $\n{}1", k=20))
        assert digest(text) == hashlib.md5(plain(text).encode()).digest()
    assert digest("Let $x$ be 1") == digest("let x  be 1 ")
    assert digest("Let x be 1") != digest("Let x be 2")
