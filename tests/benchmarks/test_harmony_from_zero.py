"""The benchmark of Harmony from zero: its configurations are ones that a run takes, and its counts are those of the rows."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import harmony_from_zero as benchmark


@pytest.fixture(autouse=True)
def no_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "model_of", lambda embeddings: Path(f"models/{embeddings}"))
    monkeypatch.setattr(benchmark, "fine_tuned_on", lambda count: Path(f"runs/form_{count}"))


@pytest.mark.parametrize("name", benchmark.CURRICULA)
def test_every_curriculum_is_a_configuration(name: str) -> None:
    config = parse(benchmark.configuration(name, 2), RLConfig, Locator(Place("run.toml")))
    assert (config.run.seed, config.run.name) == (2, f"{name}_2")
    assert config.batch.prompts_per_step * config.batch.group_size == benchmark.SAMPLES
    rewarded = config.environment.rubric
    if (curriculum := config.environment.curriculum) is not None:
        assert curriculum.stages[-1].given == ""
        rewarded = curriculum.stages[-1].weights
        assert (config.environment.task_pool.type == "mixture") == bool(benchmark.CURRICULA[name].sources)
    assert rewarded is not None
    hints = name.startswith("hints")
    assert (rewarded.structure > 0) == ("sparse" not in name and (not hints or name == "hints_given"))
    assert (config.sampling.max_new_tokens, config.optimizer.learning_rate) == ((8, 1e-4) if hints else (12, 5e-5))
    after_shown = hints and name != "hints_at_once"
    assert config.model.path.endswith("shown_2" if after_shown else "like" if hints else config.model.path)


def test_only_samples_without_examples_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [
        {"step": step, "format_ok": 1.0, "structure_ok": 1.0, "correctness": 0.5}
        | ({} if share is None else {"format_ok/bare": share})
        for step, share in enumerate((0.0, 0.3, None, 0.96, 1.0, 0.95), 1)
    ]
    monkeypatch.setattr(benchmark, "metrics_of", lambda _: rows)
    record = benchmark.record_of("examples", tmp_path / "examples_1", 3.0)
    assert (record["first_valid_step"], record["reached_step"], record["best_valid_share"]) == (2, 6, 1.0)
    assert record["valid_from_nothing"] == [[1, 0.0], [2, 0.3], [4, 0.96], [5, 1.0], [6, 0.95]]


def test_only_samples_from_nothing_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [
        (0, 0.9),
        (0, 1.0),
        (1, 0.5),
        (2, 0.2),
        (3, 0.0),
        (3, 0.1),
        (3, 0.96),
        (3, 0.94),
        (3, 0.95),
        (3, 1.0),
        (3, 0.97),
    ]
    rows: list[dict[str, Any]] = [
        {"step": step, "curriculum_stage": stage, "format_ok": share, "structure_ok": share, "correctness": 0.0}
        for step, (stage, share) in enumerate(shares, 1)
    ]
    monkeypatch.setattr(benchmark, "metrics_of", lambda _: rows)
    run = tmp_path / "prefix_0"
    record = benchmark.record_of("prefix", run, 12.4)
    assert (record["cpu_s"], record["steps"]) == (12, 11)
    assert (record["first_valid_step"], record["reached_step"], record["best_valid_share"]) == (6, 11, 1.0)
    assert record["stage_opened"] == {
        "<|channel|>final<|message|>": 1,
        "<|channel|>final": 3,
        "<|channel|>": 4,
        "nothing": 5,
    }
    assert benchmark.learned(run)
    rows.append({"step": 12, "curriculum_stage": 3, "format_ok": 0.9, "structure_ok": 0.9, "correctness": 0.0})
    assert not benchmark.learned(run)


def test_steps_with_an_example_count_as_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "RUNS", tmp_path)
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(benchmark, "nmoe", lambda *arguments: calls.append(arguments))
    (tmp_path / "shown_1.cpu_s").write_text("177\n")
    assert (benchmark.shown(1), calls) == (177, [])
    assert 0 <= benchmark.shown(2) < 1
    assert calls == [("rl", "train", str(tmp_path / "shown_2.toml"))]
    config = parse(tomllib.loads((tmp_path / "shown_2.toml").read_text()), RLConfig, Locator(Place("run.toml")))
    assert config.environment.task_pool.examples == 1
    assert (config.run.seed, config.run.steps, config.environment.env_id) == (2, 20, "harmony_shown")


def test_the_packaged_recipe_is_the_curriculum_that_reached_the_form() -> None:
    packaged, environment = benchmark.packaged("harmony_zero")
    measured = benchmark.configuration("hints_given", 0)
    for table in ("sampling", "batch", "algorithm", "optimizer", "checkpoint"):
        assert packaged[table] == measured[table]
    asked, curriculum = measured["environment"]["task_pool"]["sources"], measured["environment"]["curriculum"]
    assert environment["task_pool"] == {"type": "mixture", "sources": asked}
    assert environment["curriculum"] == curriculum
    reached = [one["reached_step"] for key, one in benchmark.read_results().items() if key.startswith("hints_given_")]
    assert len(reached) == 3
    assert max(reached) <= packaged["run"]["steps"]


def test_the_page_shows_the_recorded_results() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/harmony_from_zero.md").read_text()
    results = benchmark.read_results()
    assert len(results) >= 3
    assert "\n" + "\n".join(benchmark.table(results)) + "\n\n" in page
