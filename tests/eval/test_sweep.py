"""A sweep of models and benchmarks: its table and tests by hand, and what an interruption leaves."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import DENSE

from nmoe.config.modes import mode_of
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval import overlap as overlapping
from nmoe.eval import pair as pairing
from nmoe.eval.evaluate import Asked, Evaluation, models_and_benchmarks, without_labels
from nmoe.eval.overlap import asked_in_records
from nmoe.eval.pair import SweepInterruptedError
from nmoe.eval.sweep import Cell, compare, sweep, sweep_command, table, table_json
from nmoe.generation import FILE, read_generation
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.text.tokenizer import Tokenizer

DRAWN = Asked(mode_of(samples=2, temperature=1.0), problems=6, seed=3, max_tokens=8, device="cpu")
REVERSE = 'env_id = "reverse"\ntask_pool = { type = "generated", task_type = "reverse", difficulty = [4, 4] }\n'
CARDS = 'env_id = "cards"\ntask_pool = { type = "jsonl", task_type = "sort", path = "cards.jsonl" }\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of random weights and two benchmarks."""
    here = tmp_path_factory.mktemp("sweep")
    tokenizer = Tokenizer.train(["a"], 300)
    for seed, name in enumerate("ab"):
        (here / name).mkdir()
        config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size})
        save_model(Transformer(config).initialize(seed), here / name)
        tokenizer.save(here / name)
    authors = here / "b" / FILE
    authors.write_text(json.dumps({**read_generation(here / "b"), "temperature": 0.6}))
    (here / "reverse.toml").write_text(REVERSE)
    (here / "cards.toml").write_text(CARDS)
    rows = [{"question": f"Sort: {9 - number}{number}", "answer": f"{number}{9 - number}"} for number in range(4)]
    (here / "cards.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return here


def records(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Each file's problems in the order of their keys."""
    files = {path.name: list(map(json.loads, path.read_text().splitlines())) for path in directory.glob("*.jsonl")}
    return {
        name: sorted((row for row in rows if "key" in row), key=lambda row: row["key"]) for name, rows in files.items()
    }


def test_a_sweep_goes_on_after_an_interruption_and_does_nothing_twice(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    models, benchmarks = [place / "a", place / "b"], [place / "reverse.toml", place / "cards.toml"]
    whole = sweep(models, benchmarks, DRAWN, tmp_path / "whole")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sampling: ")]
    assert said == [f"sampling: {place / 'b' / FILE} has temperature 0.6; here it is temperature 1"], "not by benchmark"
    appended: list[Path] = []
    write = pairing.append_whole

    def broken(path: Path, content: bytes) -> None:
        write(path, content)
        appended.append(path)
        if len(appended) == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(pairing, "append_whole", broken)
    with pytest.raises(SweepInterruptedError, match="keeps the finished ones, and the same command goes on"):
        sweep(models, benchmarks, DRAWN, tmp_path / "parts")
    gc.collect()
    assert not caplog.records, "asyncio logs the error of a task that nothing awaited once the task is collected"
    with next((tmp_path / "parts").glob("*cards*.jsonl")).open("ab") as file:
        file.write(b'{"key": "torn')
    again = sweep(models, benchmarks, DRAWN, tmp_path / "parts")
    # Six and four problems of two models, and four ends of files.
    assert len(appended) == 24
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert [len(rows) for _, rows in sorted(records(tmp_path / "whole").items())] == [4, 6, 4, 6]
    assert again == whole
    assert [(cell.benchmark, cell.result.mode, cell.result.problems) for cell in whole] == [
        ("reverse", "sampling_pass@2", 6),
        ("cards", "sampling_pass@2", 4),
    ] * 2

    def nothing(*_: Any, **__: Any) -> Any:
        raise AssertionError("a finished sweep opens no model")

    monkeypatch.setattr(pairing, "open_subject", nothing)
    assert sweep(models, benchmarks, DRAWN, tmp_path / "parts") == whole
    other = Asked(DRAWN.mode, 6, seed=4, max_tokens=8, device="cpu")
    monkeypatch.undo()
    sweep(models[:1], benchmarks, other, tmp_path / "parts")
    assert len(records(tmp_path / "parts")) == 6, "another seed has files of its own"
    finished = next((tmp_path / "whole").glob("*cards*.jsonl"))
    finished.write_text("".join(finished.read_text().splitlines(True)[2:]))
    with pytest.raises(
        UserError, match=r"cards.*\.jsonl: its last line counts 4 problems, and it has 3; remove the file"
    ):
        sweep(models, benchmarks, DRAWN, tmp_path / "whole")


class Longest:
    """A scorer that prefers long answers, and says how often it was asked."""

    asked = 0

    async def score(self, messages: Any, answer: str) -> float:
        self.asked += 1
        return float(len(answer))


def test_one_model_on_one_benchmark_is_told_whole_and_goes_on(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, loaded = Longest(), list[tuple[Path, str]]()

    def load(path: Path, device: str) -> Longest:
        loaded.append((path, device))
        return scorer

    def command(asked: Asked, out: str) -> list[str]:
        sweep_command([place / "a"], [place / "cards.toml"], asked, tmp_path / "results", tmp_path / out, load)
        return capsys.readouterr().out.splitlines()

    (cell,) = sweep([place / "a"], [place / "cards.toml"], DRAWN, tmp_path / "other")
    assert command(DRAWN, "plain.json") == list(map(str, cell.evaluations))
    written = json.loads((tmp_path / "plain.json").read_text())
    assert [one["mode"] for one in written["evaluations"]] == [one.mode for one in cell.evaluations]
    assert [(len(one["correct"]), one["question"][:5]) for one in written["answers"]] == [(2, "Sort:")] * 4
    assert loaded == []

    scored = replace(DRAWN, best_of=Path("judge"))
    lines = command(scored, "scored.json")
    assert [line.split(" on cards ")[0] for line in lines] == [
        "greedy_pass@1",
        *(one.mode for one in cell.evaluations),
        "best_of@2",
        "best_of@2 - sampling_pass@2",
    ]
    assert loaded == [(Path("judge"), "cpu")]

    def nothing(*_: Any, **__: Any) -> Any:
        raise AssertionError("what is done is read")

    asked_before = scorer.asked
    monkeypatch.setattr(pairing, "open_subject", nothing)
    assert command(scored, "again.json") == lines
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "scored.json").read_bytes()
    assert scorer.asked == asked_before
    for asked, count, message in ((scored, 2, "is of one checkpoint"), (replace(scored, mode=mode_of()), 1, "several")):
        with pytest.raises(UserError, match=message):
            sweep_command([place / "a"] * count, [place / "cards.toml"], asked, tmp_path / "results", None, load)


def test_a_benchmark_that_the_model_was_trained_on_is_refused_unless_permitted(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step_000001").symlink_to(place / "a")
    (run / "config.toml").write_text(f"[environment]\n{CARDS.replace('cards.jsonl', f'{place}/cards.jsonl')}")
    with pytest.raises(UserError, match=r"cards: 4 of 4 problems are among those that .*run was trained on \(first '"):
        sweep([run], [place / "cards.toml"], DRAWN, tmp_path / "results")
    (found,) = sweep([run], [place / "cards.toml"], replace(DRAWN, allow_trained_on=True), tmp_path / "results")
    assert found.result.trained_on == found.result.record()["trained_on"] == 4
    assert f"{run} was trained on 4 of the 4 problems of cards" in list(table([found], []))
    assert str(found.result).endswith(" of 4, 4 of them trained on")
    # Of a run that learned from records, their messages count; what is no longer there cannot be compared.
    questions = [json.loads(line)["question"] for line in (place / "cards.jsonl").read_text().splitlines()]
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": questions[1].upper(), "completion": "1"}) + "\n")
    (run / "config.toml").write_text(f'[records]\npath = "{records}"\n')
    with pytest.raises(UserError, match=r"cards: 1 of 4 problems are among .* and .*records.jsonl:1\), so that"):
        sweep([run], [place / "cards.toml"], replace(DRAWN, seed=9), tmp_path / "results")
    records.unlink()
    (found,) = sweep([run], [place / "cards.toml"], replace(DRAWN, seed=9), tmp_path / "results")
    assert found.result.trained_on is None
    assert "cards: not compared with what" in capsys.readouterr().out


def test_training_data_is_read_once_for_a_model_and_not_again_for_a_file_that_was_begun(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reads = tmp_path / "run", []
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step_000001").symlink_to(place / "a")
    data = tmp_path / "records.jsonl"
    data.write_text(json.dumps({"prompt": "Who?", "completion": "1"}) + "\n")
    (run / "config.toml").write_text(f'[records]\npath = "{data}"\n')

    def read(datasets: Any) -> Any:
        reads.append(datasets)
        return asked_in_records(datasets)

    monkeypatch.setattr(overlapping, "asked_in_records", read)
    benchmarks = [place / "cards.toml", place / "reverse.toml"]
    whole = sweep([run], benchmarks, DRAWN, tmp_path / "results")
    assert len(reads) == 1
    # The last problem of each file and its end are lost, and so is the data: the files say that nothing was trained on.
    for file in (tmp_path / "results").glob("*.jsonl"):
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-2]))
    data.unlink()
    capsys.readouterr()
    again = sweep([run], benchmarks, DRAWN, tmp_path / "results")
    assert [one.evaluations for one in again] == [one.evaluations for one in whole]
    assert len(reads) == 1
    assert "not compared" not in capsys.readouterr().out


def test_a_benchmark_that_cannot_be_read_is_no_fault_of_the_training_data(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "records.jsonl"
    data.write_text(json.dumps({"prompt": "Who?", "completion": "1"}) + "\n")
    (tmp_path / "config.toml").write_text(f'[records]\npath = "{data}"\n')
    benchmark = Environment.from_toml(place / "cards.toml", Tokenizer.load(place / "a"))

    def unreadable(*_: object) -> Any:
        raise UserError("cards.jsonl:3: torn")

    monkeypatch.setattr(overlapping, "distinct_problems", unreadable)
    trained = overlapping.TrainedOn(tmp_path, place / "a")
    with pytest.raises(UserError, match=r"^cards\.jsonl:3: torn$"):
        overlapping.find_overlap(benchmark, 4, trained, allowed=True)
    assert capsys.readouterr().out == ""


def cell(name: str, *right: int, mode: str = "greedy_pass@1") -> Cell:
    outcomes = {str(place): float(value) for place, value in enumerate(right)}
    result = Evaluation(mode, "sums", len(right), sum(right) / len(right), 0.1, 0.9, outcomes=outcomes)
    return Cell(Path(name), "sums", [result], result)


def test_the_table_and_its_paired_tests_by_hand() -> None:
    cells = [cell("a", 0, 0, 1, 1, 0), cell("b", 1, 1, 1, 0, 1)]
    (comparison,) = compare(cells)
    # Differences 1, 1, 0, -1, 1 and two more problems, 1 and -1: mean 2/7, mean square 6/7; Student's quantile with 4 degrees of
    # freedom is 2.776445. Of the 16 signs of four differences, 10 give a sum of 2 or more, or of -2 or less.
    assert (comparison.problems, comparison.difference) == (5, pytest.approx(0.4))
    assert comparison.low == pytest.approx(2 / 7 - 2.776445 * ((6 / 7 - 4 / 49) / 7) ** 0.5, abs=1e-6)
    assert comparison.high == 1.0
    assert comparison.p_value == 10 / 16
    title, head, *rows, minus, _, last = table(cells, [comparison])
    assert title == "greedy_pass@1 with 95% intervals, of how many problems"
    assert [row.split() for row in (head, *rows)] == [
        ["model", "sums"],
        ["a", "40.0%", "[10.0%,", "90.0%]", "of", "5"],
        ["b", "80.0%", "[10.0%,", "90.0%]", "of", "5"],
    ]
    assert minus == "minus a, paired by problem"
    assert last.split() == ["b", "+40.0%", "[-63.8%,", "+100.0%]", "p", "=", "0.625"]
    read = json.loads(json.dumps(table_json(cells, [comparison])))
    assert read["comparisons"][0]["checkpoint"] == "b"
    assert read["results"][1]["evaluations"][0]["value"] == 0.8
    with pytest.raises(UserError, match="b and a on sums: greedy_pass@1 and sampling_pass@8 are different modes"):
        compare([cell("a", 0, 1), cell("b", 1, 1, mode="sampling_pass@8")])


def test_checkpoints_come_before_benchmarks(place: Path) -> None:
    a, b, reverse = place / "a", place / "b", place / "reverse.toml"
    assert models_and_benchmarks([a, b, reverse, Path("sort")]) == ([a, b], [reverse, Path("sort")])
    assert models_and_benchmarks([a, Path("sort")]) == ([a], [Path("sort")])
    gone = Path("gone")
    assert models_and_benchmarks([a, gone, Path("sort")], {gone: "x"}) == ([a, gone], [Path("sort")])
    with pytest.raises(UserError, match="y=sort: stands where a benchmark does"):
        models_and_benchmarks([a, Path("sort")], {Path("sort"): "y"})
    with pytest.raises(UserError, match="needs a BENCHMARK"):
        models_and_benchmarks([a])


def test_an_unknown_benchmark_is_named_with_one_that_is_alike(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'sort'"):
        sweep([place / "a"], [Path("sorrt")], DRAWN, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_models_stand_in_table_and_json_by_their_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    assert without_labels([Path("a=runs/x"), Path("lr=1"), Path("runs/y=2"), Path("sort")]) == (
        [Path("runs/x"), Path("lr=1"), Path("runs/y=2"), Path("sort")],
        {Path("runs/x"): "a"},
    )
    with pytest.raises(UserError, match="a=y: another model is called a, too"):
        without_labels([Path("a=x"), Path("a=y")])
    with pytest.raises(UserError, match="x: is named twice, a and b"):
        without_labels([Path("a=x"), Path("b=x")])
    result = Evaluation("greedy_pass@1", "sums", 4, 0.5, 0.1, 0.9, {"1": 1.0, "2": 0.0, "3": 1.0, "4": 0.0})
    cells = [Cell(Path(name), "sums", [result], result) for name in ("runs/x", "runs/y")]
    labels = {Path("runs/x"): "before"}
    _, _, first, second, minus, *_ = table(cells, compare(cells), labels)
    assert [line.split()[0] for line in (first, second)] == ["before", "runs/y"]
    assert minus == "minus before, paired by problem"
    found = table_json(cells, compare(cells), labels)["results"]
    assert [(one["checkpoint"], one.get("label")) for one in found] == [("runs/x", "before"), ("runs/y", None)]
