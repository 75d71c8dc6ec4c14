"""Records in places of their own: a run writes them there, and everything that reads the run finds them."""

import json
from pathlib import Path

import pytest

from nmoe.config.tables.run import RunSection
from nmoe.errors import UserError
from nmoe.runs.directory import RunDirectory
from nmoe.runs.places import place_records
from nmoe.runs.record import read_run

CONFIG = '[run]\nname = "one"\nsteps = 2\n'


def started(path: Path, settings: RunSection, variables: dict[str, str], resume: bool = False) -> RunDirectory:
    run = RunDirectory.create(path, CONFIG, {"argv": ["nmoe", "sft", "x"]}, resume=resume)
    if run.resumed_from is None:
        place_records(path, settings, variables)
    return run


def test_records_are_written_there_and_found_again(tmp_path: Path) -> None:
    settings = RunSection(name="one", steps=2, metrics_directory=str(tmp_path / "m"))
    variables = {
        "METRICS_LOG_DIR": str(tmp_path / "not_this"),
        "SAMPLES_LOG_DIR": str(tmp_path / "s"),
        "SPIKE_LOG_PATH": str(tmp_path / "spikes" / "all.jsonl"),
    }
    with started(tmp_path / "runs" / "one", settings, variables) as run:
        for step in (1, 2):
            run.ledger.metrics(step, {"loss": 0.5})
            run.ledger.samples(step, [{"text": "a"}])
            run.ledger.spike({"step": step, "grad_norm": 73.0})
        run.ledger.cut_back(1)
    assert json.loads((tmp_path / "m" / "one" / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}
    assert [file.name for file in (tmp_path / "s" / "one" / "samples").iterdir()] == ["step_000001.jsonl"]
    assert json.loads((tmp_path / "spikes" / "all.jsonl").read_text())["grad_norm"] == 73.0
    assert not (tmp_path / "not_this").exists(), "the key is asked before the variable"
    assert [row["step"] for row in read_run(run.path).metrics] == [1]


def test_a_run_that_starts_over_keeps_its_places(tmp_path: Path) -> None:
    settings = RunSection(name="one", steps=2, metrics_directory=str(tmp_path / "m"))
    with started(tmp_path / "one", settings, {}) as run:
        run.ledger.metrics(1, {"loss": 0.5})
    with started(tmp_path / "one", settings, {"METRICS_LOG_DIR": "elsewhere"}, resume=True) as run:
        assert (tmp_path / "m" / "one" / "metrics.jsonl").read_text() == ""
        run.ledger.metrics(1, {"loss": 0.25})
    assert read_run(run.path).last("loss") == 0.25
    assert (run.path / "metrics.jsonl").is_symlink()


def test_other_runs_records_and_a_missing_disk_are_refused(tmp_path: Path) -> None:
    settings = RunSection(name="one", steps=2, metrics_directory=str(tmp_path / "m"))
    with started(tmp_path / "one", settings, {}) as run:
        run.ledger.metrics(1, {"loss": 0.5})
    with pytest.raises(UserError, match=r"m/one/metrics.jsonl: holds the records of another run; move them, or choose"):
        started(tmp_path / "elsewhere" / "one", settings, {})
    (tmp_path / "m").rename(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"metrics.jsonl: leads to .*m/one/metrics.jsonl, which is not there; mount"):
        read_run(run.path)
    with pytest.raises(UserError, match="which is not there"):
        RunDirectory.create(run.path, CONFIG, {}, resume=True)
