"""Sinks: each one's own reader gives back metrics.jsonl, and none of them stops or slows a run."""

from __future__ import annotations

import csv
import importlib.util
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nmoe.errors import UserError
from nmoe.runs.sinks.sinks import Attempt, Feed, Sinks, refuse_without_packages, scalars_of

ROWS: list[dict[str, Any]] = [
    {"step": 1, "loss": 0.1, "groups": 8},
    {"step": 2, "loss": 1 / 3, "groups": 7, "failures/timeout": 2},
    {"step": 3, "loss": 1e-30, "held_out": -2.5, "note": "text", "flag": True},
]


def attempt(directory: Path, rows: list[dict[str, Any]] = [], number: int = 1, alerts: list[Any] = []) -> Attempt:  # noqa: B006
    return Attempt(directory, "run", number, {"run": {"seed": 3}}, "project", "offline", rows, alerts)


def tensorboard_rows(directory: Path) -> dict[int, dict[str, float]]:
    """The scalars by step, as TensorBoard's own reader gives them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert tag not in found.setdefault(event.step, {}), "a step has a number once"
            found[event.step][tag] = event.value
    return found


def csv_rows(directory: Path) -> list[dict[str, float]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return [
            {name: float(cell) if "." in cell or "e" in cell else int(cell) for name, cell in row.items() if cell}
            for row in csv.DictReader(file)
        ]


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{"step": row["step"]} | scalars_of(row) for row in rows]


def float32(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    return {row["step"]: {name: float(np.float32(value)) for name, value in scalars_of(row).items()} for row in rows}


def test_only_numbers_are_scalars() -> None:
    assert scalars_of(ROWS[2]) == {"loss": 1e-30, "held_out": -2.5}


def test_csv_gives_back_every_number_with_columns_added_as_they_appear(tmp_path: Path) -> None:
    sinks = Sinks(["csv"], attempt(tmp_path))
    for row in ROWS:
        sinks.write(row["step"], row)
    assert sinks.close() == []
    assert csv_rows(tmp_path) == numbers(ROWS)
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert header == "step,loss,groups,failures/timeout,held_out"


def test_csv_of_a_resumed_run_is_cut_back_with_the_metrics(tmp_path: Path) -> None:
    first = Sinks(["csv"], attempt(tmp_path))
    for row in ROWS:
        first.write(row["step"], row)
    first.close()
    second = Sinks(["csv"], attempt(tmp_path, ROWS[:1], number=2))
    repeated = {"step": 2, "loss": 0.25, "groups": 6}
    second.write(2, repeated)
    assert second.close() == []
    assert csv_rows(tmp_path) == numbers([ROWS[0], repeated])


def test_tensorboard_reads_one_summary_a_step_and_the_steps_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = Sinks(["tensorboard"], attempt(tmp_path))
    for row in ROWS:
        first.write(row["step"], row)
    first.alert(2, "truncated 0.92 is above 0.8")
    assert first.close() == []
    assert tensorboard_rows(tmp_path) == float32(ROWS)
    (earlier,) = (tmp_path / "tensorboard").iterdir()
    alerts = [{"step": 2, "message": "truncated 0.92 is above 0.8"}]
    second = Sinks(["tensorboard"], attempt(tmp_path, ROWS[:2], 2, alerts))
    repeated = {"step": 3, "loss": 0.5}
    second.write(3, repeated)
    assert second.close() == []
    assert tensorboard_rows(tmp_path) == float32([*ROWS[:2], repeated])
    (now,) = (tmp_path / "tensorboard").iterdir()
    assert now.name > earlier.name, "a running TensorBoard reads on in the order of names"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(now))
    events.Reload()
    ((step, text),) = [(event.step, event.tensor_proto.string_val[0]) for event in events.Tensors("alerts")]
    assert (step, text) == (2, b"truncated 0.92 is above 0.8")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    written = list(loader.RawEventFileLoader(str(now)).Load())
    assert len(written) == 2 + 3 + 1, "version, start, one event for each of three steps, one for the alert"


class Recorder:
    """Stands for a run of W&B or trackio: what it was told, and that it ended."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.logged, self.alerts, self.ended = arguments, [], [], False  # type: ignore[var-annotated]

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(scalars)))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))

    def finish(self) -> None:
        self.ended = True


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Packages `wandb` and `trackio` that keep their runs here."""
    runs: list[Recorder] = []

    def init(**arguments: Any) -> Recorder:
        runs.append(Recorder(**arguments))
        return runs[-1]

    for name in ("wandb", "trackio"):
        package = ModuleType(name)
        package.init, package.Settings = init, lambda **settings: SimpleNamespace(**settings)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.delitem(sys.modules, f"nmoe.runs.sinks.{name}", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "unset")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    return runs


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_each_attempt_is_a_hosted_run_of_its_own_that_holds_all_steps(
    name: str, hosted: list[Recorder], tmp_path: Path
) -> None:
    for number in (1, 2):
        before = ROWS[: number - 1]
        sinks = Sinks([name], attempt(tmp_path, before, number, [{"step": 1, "message": "told already"}]))
        for row in ROWS[len(before) :]:
            sinks.write(row["step"], row)
        sinks.alert(3, f"alert {number}")
        assert sinks.close() == []
    first, second = hosted
    assert [run.arguments["name"] for run in hosted] == ["run-1", "run-2"]
    assert {(run.arguments["project"], run.arguments["group"]) for run in hosted} == {("project", "run")}
    assert first.logged == second.logged == [(row["step"], scalars_of(row)) for row in ROWS]
    assert second.alerts == [("step 3", "alert 2")], "an alert before the resumption is not sent again"
    assert first.ended
    assert second.ended
    assert first.arguments["config"] == {"run": {"seed": 3}}


def test_wandb_is_offline_where_wanted_and_quiet(hosted: list[Recorder], tmp_path: Path) -> None:
    Sinks(["wandb"], attempt(tmp_path)).close()
    (run,) = hosted
    assert (run.arguments["mode"], run.arguments["dir"]) == ("offline", str(tmp_path))
    quiet = run.arguments["settings"]
    assert (quiet.x_disable_stats, quiet.x_disable_meta, quiet.disable_git, quiet.console) == (True, True, True, "off")
    assert (quiet.x_save_requirements, quiet.save_code) == (False, False)


class Failing:
    """A sink that writes only even steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if step % 2:
            raise ConnectionError(f"no answer at step {step}")
        self.steps.append(step)

    def alert(self, step: int, message: str) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def offer_steps(feed: Feed, steps: range) -> None:
    for step in steps:
        feed.offer(lambda sink, step=step: sink.write(step, {}))


def test_what_a_sink_refuses_is_counted_and_the_rest_arrives() -> None:
    sink = Failing()
    feed = Feed("failing", lambda: sink)
    offer_steps(feed, range(1, 6))
    feed.close()
    feed.join(10)
    assert sink.steps == [2, 4]
    assert feed.trouble() == (
        "sink failing: 3 of 5 records were not written: "
        "ConnectionError: no answer at step 1; ConnectionError: no answer at step 5"
    )


def test_a_sink_that_is_down_costs_nothing_and_is_named() -> None:
    def connect() -> Failing:
        raise SystemExit("no credentials")

    feed = Feed("down", connect)
    offer_steps(feed, range(3))
    feed.close()
    feed.join(10)
    offer_steps(feed, range(3, 5))
    assert feed.trouble() == (
        "sink down: 5 of 5 records were not written: could not be opened: SystemExit: no credentials"
    )


def test_a_full_queue_drops_and_counts_and_a_sink_that_hangs_delays_the_end_by_its_limit_alone() -> None:
    release = threading.Event()
    feed = Feed("slow", lambda: Failing(), limit=3)
    feed.offer(lambda _: release.wait(20))
    deadline = time.monotonic() + 10
    while feed._waiting and time.monotonic() < deadline:
        time.sleep(0.001)  # until the thread hangs in the first record
    started = time.monotonic()
    offer_steps(feed, range(0, 20, 2))
    feed.close()
    feed.join(0.05)
    assert time.monotonic() - started < 5
    assert feed.trouble() == (
        "sink slow: 11 of 11 records were not written: its queue was full; it did not end in time"
    )
    release.set()
    feed.join(10)
    assert feed.trouble() == "sink slow: 7 of 11 records were not written: its queue was full"


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = importlib.util.spec_from_loader("trackio", None)  # a folder of that name, which is no package
    monkeypatch.setattr("nmoe.runs.sinks.sinks.find_spec", {"wandb": None, "trackio": folder}.__getitem__)
    with pytest.raises(
        UserError, match=r"wandb, trackio: not installed; run: pip install 'wandb>=0\.31' 'trackio>=0\.43', or"
    ):
        refuse_without_packages(["csv", "wandb", "trackio"])
    refuse_without_packages(["csv"])
