"""The ledger: what a line holds, what it refuses, and what cutting back keeps."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nmoe.errors import UserError
from nmoe.runs.ledger import Ledger, read_lines, read_metrics


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("samples", "eval"):
        (tmp_path / name).mkdir()
    return tmp_path


def result(**changes: Any) -> dict[str, Any]:
    return {"mode": "greedy_pass@1", "dataset": "d", "problems": 2, "value": 0.5, "low": 0.1, "high": 0.9} | changes


def test_metrics_are_one_line_per_step(run: Path) -> None:
    ledger = Ledger(run)
    ledger.metrics(1, {"reward_mean": 0.25, "tokens_in_batch": 12})
    ledger.metrics(2, {"reward_mean": 0.5})
    assert (run / "metrics.jsonl").read_text() == (
        '{"step": 1, "reward_mean": 0.25, "tokens_in_batch": 12}\n{"step": 2, "reward_mean": 0.5}\n'
    )
    assert read_metrics(run) == read_metrics(run / "metrics.jsonl")
    assert read_metrics(run)[1] == {"step": 2, "reward_mean": 0.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_metric_that_is_no_number_is_refused_by_name(run: Path, value: float | None) -> None:
    with pytest.raises(ValueError, match=r"grad_norm.* is (nan|inf|-inf|None)"):
        Ledger(run).metrics(3, {"reward_mean": 0.5, "grad_norm": value})
    assert not (run / "metrics.jsonl").exists()


def test_a_nested_number_is_refused_by_name_and_a_tensor_by_type(run: Path) -> None:
    ledger = Ledger(run)
    with pytest.raises(ValueError, match=r"sample of step 3: tokens: logprobs\[1\] is nan"):
        ledger.samples(3, [{"tokens": {"logprobs": [-0.5, math.nan]}}])
    with pytest.raises(TypeError, match="step 3: grad_norm is a Tensor; give a Python number"):
        ledger.metrics(3, {"grad_norm": torch.tensor(1.0)})


def test_samples_and_evaluations_are_files_of_their_step(run: Path) -> None:
    ledger = Ledger(run)
    ledger.samples(10, [{"text": "first"}])
    ledger.samples(10, [{"text": "a\nb", "answer": None}, {"text": "\ud800"}])
    ledger.evaluation(10, {"results": [result()]})
    lines = (run / "samples" / "step_000010.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "a\nb", "answer": None}, {"text": "\ud800"}]
    assert json.loads((run / "eval" / "step_000010.json").read_text()) == {"step": 10, "results": [result()]}


def test_records_without_what_readers_need_are_refused(run: Path) -> None:
    ledger = Ledger(run)
    incomplete = result()
    del incomplete["mode"], incomplete["value"]
    with pytest.raises(ValueError, match="evaluation of step 1: a result lacks mode, value"):
        ledger.evaluation(1, {"results": [incomplete]})
    with pytest.raises(ValueError, match=r"failures\.jsonl lacks 'failure'"):
        ledger.failure({"step": 1})
    with pytest.raises(ValueError, match=r"alerts\.jsonl lacks 'message'"):
        ledger.alert({"step": 1})
    with pytest.raises(ValueError, match=r"spikes\.jsonl lacks 'step'"):
        ledger.spike({"grad_norm": 73.0})


def fill(ledger: Ledger, steps: range) -> None:
    for step in steps:
        ledger.metrics(step, {"loss": step / 2})
        ledger.failure({"step": step, "failure": "timeout"})
        ledger.alert({"step": step, "message": "m"})
        ledger.spike({"step": step, "grad_norm": 60.0})
        ledger.samples(step, [{"text": "t"}])
        ledger.evaluation(step, {"results": [result()]})


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("torn", [b"", b'{"step": 5, "lo', b'{"step": 1}'])
def test_cut_back_leaves_exactly_the_run_up_to_the_step(tmp_path: Path, torn: bytes) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run, steps in ((whole, range(3)), (cut, range(5))):
        (run / "samples").mkdir(parents=True)
        (run / "eval").mkdir()
        fill(Ledger(run), steps)
    for name in ("metrics", "failures", "alerts", "spikes"):
        with (cut / f"{name}.jsonl").open("ab") as file:
            file.write(torn)
    (cut / "samples" / ".step_000004.jsonl.partial").touch()
    Ledger(cut).cut_back(2)
    assert contents(cut) == contents(whole)


def test_cut_back_to_nothing_forgets_step_0_too(run: Path) -> None:
    fill(Ledger(run), range(2))
    (run / "samples" / "notes.txt").write_text("mine")
    Ledger(run).cut_back(None)
    assert {name: content for name, content in contents(run).items() if content} == {"samples/notes.txt": b"mine"}


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 1.0}', '{"step": "2"}', ""])
def test_a_broken_line_is_named(run: Path, line: str) -> None:
    (run / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: .*remove the line"):
        read_metrics(run)


def test_missing_metrics_are_an_error_and_missing_alerts_are_none(run: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: no metrics there"):
        read_metrics(run)
    assert read_lines(run / "alerts.jsonl") == []


@given(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text()))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    run = tmp_path_factory.mktemp("run")
    values.pop("step", None)
    Ledger(run).metrics(7, values)
    assert read_metrics(run) == [{"step": 7} | values]


def test_the_best_step_is_no_worse_than_any_before(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    ledger = Ledger(tmp_path)
    for step, value in [(0, 0.9), (10, 0.2), (20, 0.5), (30, 0.4), (40, 0.5)]:
        result = {"mode": "greedy_pass@1", "dataset": "d", "problems": 1, "value": value, "low": 0.0, "high": 1.0}
        ledger.evaluation(step, {"results": [result]})
    assert [step for step in (10, 20, 25, 30, 40) if ledger.is_best(step)] == [10, 20, 40]
