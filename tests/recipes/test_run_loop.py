"""The run loop under a recipe that counts: what is evaluated, saved and recorded at which step, and what a resumed run repeats."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from nmoe.config.commands import RunConfig
from nmoe.errors import UserError
from nmoe.model.idle_threads import IDLE
from nmoe.model.snapshot import Snapshot
from nmoe.recipes.run_loop import HeldOut, Interruptible, Recipe, Run, Step, open_run
from nmoe.runs.ledger import read_metrics
from nmoe.runs.state import Part
from nmoe.runs.storage import resumed_by


class Counting(Recipe):
    """Adds the step's number at each step; its evaluations give `values` by step. `log` says what the loop asked of it."""

    def __init__(self, values: dict[int, float], every: int, ends: int | None = None) -> None:
        self.values, self.evaluate_every, self.ends = values, every, ends
        self.evaluate_first = 0 in values
        self.sum = self.at = 0
        self.log: list[str] = []

    def watched(self) -> None:
        return None

    def notes(self) -> list[str]:
        return ["a recipe that counts"]

    def start(self) -> None:
        self.log.append("start")

    def step(self, step: int) -> Step:
        self.sum, self.at = self.sum + step, step
        self.log.append(f"step {step}")
        return Step({"sum": self.sum}, {"sum": float(self.sum)})

    def evaluate(self) -> HeldOut:
        self.log.append(f"evaluate {self.at}")
        result = {"mode": "m", "dataset": "d", "problems": 1, "value": self.values[self.at], "low": 0.0, "high": 1.0}
        return HeldOut({"held_out": self.values[self.at]}, f"value {self.values[self.at]}", [result], {"ece": 0.5})

    def reason_to_end(self) -> str | None:
        return "it has counted enough" if self.at == self.ends else None

    def parts(self) -> dict[str, Part]:
        return {"counter": self}

    def snapshot(self, copied: bool) -> Snapshot:
        self.log.append(f"save {self.at}")
        weights = str(self.sum)
        return Snapshot(lambda directory: (directory / "weights").write_text(weights) and None, state={"at": self.at})

    def load(self, directory: Path, state: dict[str, int]) -> None:
        self.sum, self.at = int((directory / "weights").read_text()), state["at"]
        self.log.append(f"load {self.at}")

    def resume(self) -> None:
        self.log.append("resume")


def follow(directory: Path, recipe: Recipe, steps: int = 5, every: int = 2, resume: bool = False) -> Run:
    tables = {
        "run": {"name": "counts", "directory": str(directory), "steps": steps, "resume": resume},
        "model": {"path": "nowhere"},
        "checkpoint": {"every_steps": every},
    }
    with open_run(RunConfig.model_validate(tables), threads=1) as run:
        run.follow(recipe)
    return run


def test_steps_are_evaluated_and_saved_when_due_the_last_and_the_best_always(tmp_path: Path) -> None:
    recipe = Counting({0: 0.1, 3: 0.9, 5: 0.2}, every=3)
    run = follow(tmp_path, recipe)
    steps = ["step 1", "step 2", "save 2", "step 3", "evaluate 3", "save 3", "step 4", "save 4"]
    assert recipe.log == ["start", "evaluate 0", *steps, "step 5", "evaluate 5", "save 5"]
    rows = read_metrics(run.directory.path)
    assert [(row["step"], row["sum"], row.get("held_out")) for row in rows] == [
        (1, 1, None),
        (2, 3, None),
        (3, 6, 0.9),
        (4, 10, None),
        (5, 15, 0.2),
    ]
    assert (run.directory.checkpoints / "best").readlink() == Path("step_000003")
    evaluation = json.loads((run.directory.path / "eval/step_000003.json").read_text())
    assert (evaluation["step"], evaluation["results"][0]["value"], evaluation["ece"]) == (3, 0.9, 0.5)
    log = (run.directory.path / "log.txt").read_text().splitlines()
    assert [line for line in log if "value" in line] == ["step 0: value 0.1", "step 3: value 0.9", "step 5: value 0.2"]


def test_no_recipe_forgets_the_learner_whose_experts_are_watched() -> None:
    class Forgetful(Counting):
        watched = Recipe.watched

    with pytest.raises(TypeError, match=r"abstract method '?watched"):
        Forgetful({}, every=0)


def test_a_start_that_is_refused_leaves_neither_links_nor_a_mark(tmp_path: Path) -> None:
    def start(place: str, samples: str) -> None:
        tables = {
            "run": {
                "name": "one",
                "directory": str(tmp_path / place),
                "steps": 1,
                "samples_directory": str(tmp_path / samples),
            },
            "model": {"path": "nowhere"},
            "checkpoint": {"export_directory": str(tmp_path / "exports")},
        }
        with open_run(RunConfig.model_validate(tables), threads=1):
            pass

    (tmp_path / "full/one/samples").mkdir(parents=True)
    with pytest.raises(UserError, match="full/one/samples: is there already"):
        start("a", "full")
    assert not (tmp_path / "exports").exists(), "a mark would keep the next run out"
    (tmp_path / "exports/one/step_000001").mkdir(parents=True)
    with pytest.raises(UserError, match="exports/one: holds the exported checkpoints of another run"):
        start("b", "others")
    assert not (tmp_path / "b/one").exists()
    assert not (tmp_path / "others/one/samples").exists()


def test_a_resumed_run_marks_the_best_checkpoint_that_its_records_name(tmp_path: Path) -> None:
    values = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.3}
    run = follow(tmp_path, Counting(values, every=1), steps=3, every=1)
    best = run.directory.checkpoints / "best"
    best.unlink()
    best.symlink_to("step_000001")  # as a kill before the mark of step 2 left it
    follow(tmp_path, Counting(values, every=1), steps=4, every=1, resume=True)
    assert best.readlink() == Path("step_000002")


def test_a_signal_ends_the_run_after_the_step_and_a_resumed_one_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Counting):
        def step(self, step: int) -> Step:
            if step == 3:
                signal.raise_signal(signal.SIGINT)
            return super().step(step)

    recipe = Interrupted({}, every=0)
    with pytest.raises(KeyboardInterrupt), resumed_by("--again"):
        follow(tmp_path, recipe)
    assert "interrupted: saved step 3; go on with --again\n" in capsys.readouterr().out
    assert recipe.log == ["start", "step 1", "step 2", "save 2", "step 3", "save 3"]
    resumed = Counting({}, every=0)
    run = follow(tmp_path, resumed, resume=True)
    assert resumed.log == ["load 3", "resume", "step 4", "save 4", "step 5", "save 5"]
    assert [row["sum"] for row in read_metrics(run.directory.path)] == [1, 3, 6, 10, 15]


def test_a_recipe_may_end_the_run_at_an_evaluation_and_a_resumed_one_stays_ended(tmp_path: Path) -> None:
    recipe = Counting({2: 0.5, 4: 0.6}, every=2, ends=4)
    follow(tmp_path, recipe, steps=9, every=9)
    assert recipe.log[-3:] == ["step 4", "evaluate 4", "save 4"]
    resumed = Counting({}, every=2, ends=4)
    run = follow(tmp_path, resumed, steps=9, every=9, resume=True)
    assert resumed.log == ["load 4", "resume"]
    log = (run.directory.path / "log.txt").read_text()
    assert "step 4: ends here, since it has counted enough" in log
    assert "step 4: ended here, since it has counted enough" in log


def test_a_baseline_that_suffices_ends_a_resumed_run_no_earlier_than_an_uninterrupted_one(tmp_path: Path) -> None:
    class Content(Counting):
        def reason_to_end(self) -> str:
            return "the baseline was good enough"

    values = {0: 0.9, 4: 0.9}
    whole = Content(values, every=4)
    follow(tmp_path / "whole", whole, steps=9)
    cut = Content(values, every=4)
    run = follow(tmp_path / "cut", cut, steps=9)
    shutil.rmtree(run.directory.checkpoints / "step_000004")
    resumed = Content(values, every=4)
    follow(tmp_path / "cut", resumed, steps=9, resume=True)
    assert resumed.log[:2] == ["load 2", "resume"]
    assert resumed.log[2:] == whole.log[-4:] == ["step 3", "step 4", "evaluate 4", "save 4"]


def test_a_run_from_before_a_key_existed_resumes_where_the_key_has_its_default(tmp_path: Path) -> None:
    config = follow(tmp_path, Counting({}, every=0), steps=2).directory.path / "config.toml"
    written = config.read_text()
    assert "beta1 = 0.9\n" in written
    config.write_text(written.replace("beta1 = 0.9\n", ""))
    resumed = Counting({}, every=0)
    follow(tmp_path, resumed, steps=3, resume=True)
    assert resumed.log == ["load 2", "resume", "step 3", "save 3"]
    for other in (written.replace("beta1 = 0.9", "beta1 = 0.8"), written.replace('path = "nowhere"\n', "")):
        config.write_text(other)
        with pytest.raises(UserError, match="These keys differ"):
            follow(tmp_path, Counting({}, every=0), steps=3, resume=True)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_ctrl_c_interrupts(first: signal.Signals) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), Interruptible() as interrupt:  # noqa: PT012 (the first signal must not raise)
        assert not interrupt.requested
        os.kill(os.getpid(), first)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was swallowed")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_says_what_idle_threads_do_and_when_others_first_slow_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slowed(Counting):
        def step(self, step: int) -> Step:
            if step in (2, 4):
                IDLE.slept, IDLE.why = IDLE.slept + 1, f"other processes use {step / 2 + 0.4} cores"
            return super().step(step)

    monkeypatch.setattr(IDLE, "slept", 7)  # in an earlier run of the process
    monkeypatch.setattr(IDLE, "why", "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    follow(tmp_path, Slowed({}, every=0))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"2 threads; idle ones {IDLE.describe()}"
    assert [line for line in lines if "other processes" in line and line.startswith("step")] == [
        "step 2: other processes use 1.4 cores, so idle threads sleep until more are free"
    ]
