"""The ledger: what a line holds and refuses, what cutting back keeps, and when an evaluation is worse than by chance."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nmoe.errors import UserError
from nmoe.runs.ledger import Ledger, _sample_line, lasting_loss, loss_of, read_lines, read_metrics


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


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
@example(["NaN", "-Infinity", "\x7f", "\u2028", "\x1b", "\ud800", "\U0001f600", 2**80, -0.0, 5e-324, 1e16, 0.1])
def test_a_sample_is_written_as_json_writes_it_but_for_blanks(value: Any) -> None:
    line = _sample_line({"value": value}, "here")
    assert repr(json.loads(line)) == repr({"value": value})
    assert (line.isascii(), line.count(b"\n")) == (True, 1)
    for text in (text for text in _texts(value) if text):
        assert json.dumps(text).encode() in line


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in _texts(one)]


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


def test_the_best_step_is_the_latest_of_the_best_results(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    ledger = Ledger(tmp_path)
    for step, value in [(0, 0.9), (10, 0.2), (20, 0.5), (30, 0.4), (40, 0.5)]:
        result = {"mode": "greedy_pass@1", "dataset": "d", "problems": 1, "value": value, "low": 0.0, "high": 1.0}
        ledger.evaluation(step, {"results": [result]})
    assert [ledger.best_step(step) for step in (0, 10, 20, 25, 30, 40)] == [None, 10, 20, 20, 20, 40]


def graded(right: Sequence[float], **more: Any) -> dict[str, Any]:
    outcomes = {str(place): float(one) for place, one in enumerate(right)}
    return {"mode": "greedy_pass@1", "dataset": "math", "value": sum(right) / len(right), "outcomes": outcomes, **more}


def first(count: int, of: int = 30) -> dict[str, Any]:
    """The first `count` problems right."""
    return graded([1.0] * count + [0.0] * (of - count))


def test_one_fall_that_stays_is_a_loss_in_two_evaluations() -> None:
    history = [first(2), first(29), first(0)]
    loss = loss_of(history)
    assert loss is not None
    assert (loss.before, loss.now) == (29 / 30, 0.0)
    # 29 problems differ, all in one direction; there were two earlier evaluations to choose the best from.
    assert loss.p == pytest.approx(2 * 0.5**29, rel=1e-6)
    assert lasting_loss(history, 2) is None
    assert lasting_loss([*history, first(0)], 2) is not None
    assert lasting_loss([*history, first(0)], 0) is None
    assert lasting_loss([first(29), first(0), first(28)], 2) is None, "it came back"


def test_how_many_problems_a_loss_takes() -> None:
    """Five lost of 30 and none gained: 2^-5 = 0.031 against one earlier evaluation, and 0.0625 against two."""
    assert loss_of([first(10), first(5)]) is not None
    assert loss_of([first(10), first(6)]) is None, "2^-4 is more than 5%"
    assert loss_of([first(9), first(10), first(5)]) is None
    assert loss_of([first(9), first(10), first(4)]) is not None, "2 x 2^-6 is 0.031"
    assert loss_of([first(10), first(15)]) is None, "a gain is none"
    assert loss_of([first(10)]) is None


def test_the_first_counts_as_the_best_does() -> None:
    """The best has other problems than the last, of which many are gained as well; of the first, six are lost and none gained."""
    start = first(6, 12)
    best = graded([0.0] * 5 + [1.0] * 7)
    last = graded([0.0] * 12)
    assert loss_of([start, best, last]) is not None
    mixed = graded([0.0] * 6 + [1.0] * 5 + [0.0])
    assert loss_of([start, best, mixed]) is None


def test_only_results_of_the_same_problems_in_the_same_way_are_compared() -> None:
    assert loss_of([first(29, 31), first(0)]) is None
    assert loss_of([first(29) | {"mode": "sampling_pass@1"}, first(0)]) is None
    assert loss_of([{"value": 0.9, "mode": "greedy_pass@1"}, {"value": 0.0, "mode": "greedy_pass@1"}]) is None
    falling = [graded([2.0] * 9, lower_is_better=True), graded([1.0] * 9, lower_is_better=True)]
    assert loss_of(falling) is None, "a loss that falls is better"
    assert loss_of(falling[::-1]) is not None


def test_equal_evaluations_end_hardly_any_run() -> None:
    """Six evaluations of one policy at the 5% level; two successive drops, the rule of before, end about half of such runs."""
    draw = random.Random(0)
    ended = fell = 0
    for _ in range(300):
        chances = [draw.random() for _ in range(100)]
        runs = [graded([draw.random() < one for one in chances]) for _ in range(6)]
        ended += any(lasting_loss(runs[:count], 2) for count in range(3, 7))
        values = [one["value"] for one in runs]
        fell += any(values[place] > values[place + 1] > values[place + 2] for place in range(4))
    assert ended <= 9, "3%; `benchmarks/stopping.py` measures 2%"
    assert fell > 100
