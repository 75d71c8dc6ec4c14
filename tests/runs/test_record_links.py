"""Records in places of their own: a run writes them there, and everything that reads the run finds them."""

import json
import os
import shutil
from pathlib import Path

import pytest

from nmoe.config.tables.run import RunSection
from nmoe.errors import UserError
from nmoe.runs.directory import RunDirectory
from nmoe.runs.provenance import provenance
from nmoe.runs.record import read_run
from nmoe.runs.record_links import VARIABLES, claim_exports, link_records

CONFIG = '[run]\nname = "one"\nsteps = 2\n'


def started(path: Path, settings: RunSection, variables: dict[str, str], resume: bool = False) -> RunDirectory:
    run = RunDirectory.create(path, CONFIG, {"argv": ["nmoe", "sft", "x"]}, resume=resume)
    try:
        if run.resumed_from is None:
            link_records(path, settings, variables)
    except BaseException:
        run.abandon()
        raise
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


def test_a_run_that_ended_before_its_first_step_may_begin_with_other_places(tmp_path: Path) -> None:
    places = [
        RunSection(
            name="one", steps=2, **{key: str(tmp_path / where / key) for key in VARIABLES}
        ) for where in "ab"
    ]  # fmt: skip
    with started(tmp_path / "one", places[0], {}) as run:
        run.ledger.spike({"step": 1, "grad_norm": 73.0})
        run.ledger.samples(1, [{"text": "a"}])
    with started(tmp_path / "one", places[1], {}) as run:
        run.ledger.metrics(1, {"loss": 0.5})
    assert [file for file in (tmp_path / "a").rglob("*") if file.is_file() or file.name == "samples"] == []
    assert (tmp_path / "b/metrics_directory/one/metrics.jsonl").read_text()
    assert os.listdir(run.path / "samples") == []


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


def test_an_empty_variable_and_the_runs_own_directory_need_no_link(tmp_path: Path) -> None:
    own = tmp_path / "runs" / "one"
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for place in ("", str(tmp_path / "runs"), str(tmp_path / "link")):
        spikes = place and f"{place}/one/spikes.jsonl"
        variables = {"METRICS_LOG_DIR": place, "SAMPLES_LOG_DIR": place, "SPIKE_LOG_PATH": spikes}
        with started(own, RunSection(name="one", steps=2), variables) as run:
            run.ledger.metrics(1, {"loss": 0.5})
            run.ledger.samples(1, [{"text": "a"}])
            run.ledger.spike({"step": 1, "grad_norm": 73.0})
        assert [row["step"] for row in read_run(own).metrics] == [1]
        assert not any(path.is_symlink() for path in own.iterdir())
        shutil.rmtree(own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "runs"]


def test_a_place_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.jsonl").touch()

    def settings(spikes: str, name: str = "one") -> RunSection:
        places = {f"{kind}_directory": str(tmp_path / kind) for kind in ("metrics", "samples")}
        return RunSection(name=name, steps=2, **places, spikes_file=str(tmp_path / spikes))

    for spikes, said in (
        ("file/x", "file: no directory can be made there; choose another --run.spikes_file"),
        ("taken.jsonl", "taken.jsonl: is there already, as another run that begins would leave it; remove it, or"),
        ("runs/one/other.jsonl", "runs/one/other.jsonl: lies in the directory of the run itself; choose another"),
        ("metrics/one/metrics.jsonl", "metrics/one/metrics.jsonl: is there already"),
    ):
        with pytest.raises(UserError, match=f"^{tmp_path}/{said}") as refused:
            started(tmp_path / "runs" / "one", settings(spikes), {})
        assert refused.value.exit_code == 2
        assert not (tmp_path / "runs" / "one").exists()
        assert [path.name for kind in ("metrics", "samples") for path in (tmp_path / kind).rglob("*")] == ["one", "one"]
    started(tmp_path / "runs" / "one", settings("spikes.jsonl"), {}).close()
    with pytest.raises(UserError, match="another run that begins"):
        started(tmp_path / "others" / "two", settings("spikes.jsonl", "two"), {})


def test_a_run_that_began_before_may_begin_again_after_a_place_was_refused(tmp_path: Path) -> None:
    """Its directory is not removed, as that of a new run is, so it needs its samples/ back."""
    (tmp_path / "taken.jsonl").touch()
    samples = str(tmp_path / "samples")
    started(tmp_path / "one", RunSection(name="one", steps=2), {}).close()
    refused = RunSection(name="one", steps=2, samples_directory=samples, spikes_file=str(tmp_path / "taken.jsonl"))
    for resume in (False, True):
        with pytest.raises(UserError, match=r"taken.jsonl: is there already"):
            started(tmp_path / "one", refused, {}, resume)
        assert (tmp_path / "one" / "samples").is_dir()
        assert not (tmp_path / "one" / "samples").is_symlink()
    with started(tmp_path / "one", RunSection(name="one", steps=2, samples_directory=samples), {}) as run:
        run.ledger.samples(1, [{"text": "a"}])
    assert [file.name for file in (tmp_path / "samples/one/samples").iterdir()] == ["step_000001.jsonl"]


def test_a_place_that_a_variable_chose_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "samples" / "one" / "samples").mkdir(parents=True)
    (tmp_path / "samples" / "one" / "samples" / "notes.txt").touch()
    own, other = (
        "lies in the directory of the run itself",
        "is there already, and holds something other than the records of a run",
    )
    for variable, place, below, said, key in (
        ("METRICS_LOG_DIR", "runs/one", "/one/metrics.jsonl", own, "metrics_directory"),
        ("SAMPLES_LOG_DIR", "samples", "/one/samples", other, "samples_directory"),
        ("SPIKE_LOG_PATH", "run.toml", "", other, "spikes_file"),
        ("SPIKE_LOG_PATH", "run.toml/x", "", "no directory can be made there", "spikes_file"),
    ):
        with pytest.raises(UserError) as refused:
            started(tmp_path / "runs" / "one", RunSection(name="one", steps=2), {variable: str(tmp_path / place)})
        named = tmp_path / place.removesuffix("/x")
        assert (
            str(refused.value)
            == f"{named}{below}: {said}; change the variable {variable}, or choose another --run.{key}"
        )
    with pytest.raises(UserError, match=f"run.toml: {other}; choose another --run.spikes_file"):
        started(tmp_path / "x", RunSection(name="x", steps=2, spikes_file=str(tmp_path / "run.toml")), {})


def test_runs_that_start_in_the_same_second_are_two(tmp_path: Path) -> None:
    for place in ("a", "b"):
        started = provenance(seed=0, threads=1) | {"started_utc": "2026-01-02T03:04:05Z"}
        RunDirectory.create(tmp_path / place, CONFIG, started, resume=False).close()
    claim_exports(tmp_path / "a", tmp_path / "exports")
    (tmp_path / "exports" / "step_000001").mkdir()
    claim_exports(tmp_path / "a", tmp_path / "exports")
    with pytest.raises(UserError, match="holds the exported checkpoints of another run"):
        claim_exports(tmp_path / "b", tmp_path / "exports")


def test_exported_checkpoints_are_of_one_run(tmp_path: Path) -> None:
    """A save replaces and prunes what has the names of its checkpoints."""
    exports = tmp_path / "exports"
    for place, start in (("a", "01"), ("b", "02")):
        RunDirectory.create(tmp_path / place, CONFIG, {"started_utc": start}, resume=False).close()
    claim_exports(tmp_path / "a", exports)
    with pytest.raises(UserError, match=f"^{exports}: holds the exported checkpoints of another run; move them, or"):
        claim_exports(tmp_path / "b", exports)
    (exports / "step_000001").mkdir()
    claim_exports(tmp_path / "a", exports)
    (tmp_path / "a").rename(tmp_path / "moved")
    claim_exports(tmp_path / "moved", exports)
    (exports / ".run.json").unlink()  # copied there without the mark
    for run in ("moved", "b"):
        with pytest.raises(UserError, match="of another run"):
            claim_exports(tmp_path / run, exports)
    (exports / ".run.json").write_text("{}")  # torn
    with pytest.raises(UserError, match="of another run"):
        claim_exports(tmp_path / "b", exports)
