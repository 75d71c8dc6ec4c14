"""The run directory: refusals, resumption, and one writer at a time, kills and forked workers included."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nmoe.errors import StorageError, UserError
from nmoe.runs.checkpoint import save_checkpoint
from nmoe.runs.directory import Resume, RunDirectory, is_free
from nmoe.runs.ledger import read_metrics
from nmoe.runs.provenance import read_provenance, recorded_threads, resumptions

CONFIG = """
[run]
name = "x"
steps = 20
threads = 2
resume = false
[checkpoint]
every_steps = 10
[optimizer]
learning_rate = 0.1
[algorithm.clip]
low = 0.2
"""
PROVENANCE: dict[str, Any] = {"seed": 0, "threads": 2, "started_utc": "2026-01-02T03:04:05Z"}


def create(path: Path, config: str = CONFIG, resume: Resume = False, threads: int = 2) -> RunDirectory:
    return RunDirectory.create(path, config, PROVENANCE | {"threads": threads}, resume)


def write(directory: Path) -> None:
    (directory / "model.safetensors").write_text("weights")


def make_run(path: Path, steps: int, checkpoint: int | None) -> None:
    """A run killed after `steps`, in the middle of a line."""
    with create(path) as run:
        for step in range(1, steps + 1):
            run.ledger.metrics(step, {"loss": 1 / step})
            run.ledger.samples(step, [{"text": "t"}])
            if step == checkpoint:
                save_checkpoint(run.checkpoints, step, write, keep=1)
        run.log.write_text("log\n")
        for name in ("tokenizer", *(f"step_{step:06d}-sampled-x" for step in (4, 5, 6)), ".step_000005-y.partial"):
            (run.replays / name).mkdir()
            (run.replays / name / "bundle.json").touch()
        (run.path / "report.md").touch()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": ')


def test_a_new_run_has_its_layout(tmp_path: Path) -> None:
    with create(tmp_path / "runs" / "x") as run:
        assert run.resumed_from is None
        assert run.start_step == 0
        assert run.log == tmp_path / "runs" / "x" / "log.txt"
        assert {path.name for path in run.path.iterdir()} == {
            *(".lock", "config.toml", "provenance.json"),
            *("samples", "replay", "eval", "checkpoints"),
        }
        assert (run.path / "config.toml").read_text() == CONFIG
        assert read_provenance(run.path) == PROVENANCE | {"resumed": []}


def test_an_existing_run_is_not_written_over(tmp_path: Path) -> None:
    begun, saved, other = (tmp_path / name for name in ("begun", "saved", "other"))
    make_run(begun, steps=1, checkpoint=None)
    with create(saved) as run:
        save_checkpoint(run.checkpoints, 1, write, keep=1)
    create(other).close()
    (other / "config.toml").unlink()
    for path in (begun, saved, other):
        with pytest.raises(UserError, match=r": exists and is not empty; pass --run\.resume=true .* --run\.name=NAME"):
            create(path)
        assert not is_free(path)


def test_a_run_that_ended_before_its_first_step_blocks_no_start(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with create(tmp_path / "x") as run:
        run.ledger.failure({"step": 1, "failure": "grader_error"})
        run.ledger.evaluation(0, {"results": []})
        run.log.write_text("log\n")
    (run.path / "notes.md").write_text("mine")
    assert is_free(run.path)
    assert (run.path / "failures.jsonl").read_text(), "what failed can be read until the next start"
    changed = CONFIG.replace("learning_rate = 0.1", "learning_rate = 0.2")
    with create(tmp_path / "x", changed) as run:
        assert (run.start_step, (run.path / "config.toml").read_text()) == (0, changed)
        assert (run.path / "failures.jsonl").read_text() == ""
        assert os.listdir(run.path / "eval") == []
        assert [(run.path / name).read_text() for name in ("notes.md", "log.txt")] == ["mine", "log\n"]
        run.ledger.metrics(1, {"loss": 0.5})
    assert not is_free(run.path)


def test_what_is_no_run_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"not the directory of a run \(no config\.toml\)"):
        create(tmp_path, resume=True)
    with pytest.raises(UserError, match=r"thesis\.tex: is a file"):
        create(tmp_path / "thesis.tex")
    for below in ("thesis.tex/x", "thesis.tex/runs/x"):
        with pytest.raises(
            UserError, match=rf"{below}: .*thesis\.tex is a file, so no run .* --run\.directory=DIRECTORY"
        ):
            create(tmp_path / below)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(UserError, match=r"/proc/x: no directory can be made there; .* --run\.directory=DIRECTORY"):
        create(Path("/proc/x"))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    create(tmp_path / "x").close()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StorageError, match=r"x: .*Permission denied"):
        create(tmp_path / "x", resume=resume)


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_left_only_its_lock_starts_again(tmp_path: Path, resume: bool) -> None:
    (tmp_path / ".lock").touch()
    with create(tmp_path, resume=resume) as run:
        assert run.start_step == 0


def test_resuming_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=7, checkpoint=5)
    with create(tmp_path / "x", CONFIG.replace("steps = 20", "steps = 30"), resume=True, threads=3) as run:
        assert run.resumed_from == tmp_path / "x" / "checkpoints" / "step_000005"
        assert run.start_step == 5
        assert run.number == 2
        run.ledger.metrics(6, {"loss": 0.5})
        assert read_provenance(run.path)["resumed"] == [], "the checkpoint may yet be refused"
        run.record_start()
    assert [row["step"] for row in read_metrics(tmp_path / "x")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "x" / "samples" / "step_000005.jsonl").exists()
    assert not (tmp_path / "x" / "samples" / "step_000006.jsonl").exists()
    assert sorted(path.name for path in (tmp_path / "x" / "replay").iterdir()) == [
        *("step_000004-sampled-x", "step_000005-sampled-x", "tokenizer")
    ]
    provenance = json.loads((tmp_path / "x" / "provenance.json").read_text())
    assert provenance["threads"] == 2
    assert provenance["resumed"] == [PROVENANCE | {"threads": 3, "from_step": 5, "changed": {"run.steps": [20, 30]}}]
    assert list(resumptions(provenance)) == ["from step 5 at 2026-01-02T03:04:05Z, run.steps 20 -> 30"]
    assert recorded_threads(tmp_path / "x") == 3
    with create(tmp_path / "x", resume=True) as run:
        assert run.number == 3


def test_without_a_checkpoint_a_run_starts_over_with_its_log_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=3, checkpoint=None)
    with create(tmp_path / "x", resume=True, threads=4) as run:
        assert run.resumed_from is None
        assert run.start_step == 0
    kept = {str(path.relative_to(tmp_path / "x")) for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert kept == {".lock", "config.toml", "provenance.json", "metrics.jsonl", "log.txt"}
    assert (tmp_path / "x" / "metrics.jsonl").read_bytes() == b""
    assert read_provenance(tmp_path / "x") == PROVENANCE | {"threads": 4, "resumed": []}


def test_a_run_that_is_not_there_is_resumed_by_auto_alone(tmp_path: Path) -> None:
    create(tmp_path / "attempt_7").close()
    for name, said in (
        ("atempt_7", rf", but there is {tmp_path}/attempt_7 \(--run\.name=attempt_7\); leave --run\.resume out"),
        ("x", r"; leave --run\.resume out to start one"),
    ):
        with pytest.raises(UserError, match=rf"^{tmp_path}/{name}: there is no run to resume{said}"):
            create(tmp_path / name, resume=True)
    assert os.listdir(tmp_path) == ["attempt_7"]
    assert recorded_threads(tmp_path / "x") is None
    with create(tmp_path / "x", resume="auto") as run:
        assert run.start_step == 0
    assert recorded_threads(tmp_path / "x") == 2


def test_resuming_with_another_configuration_names_every_key(tmp_path: Path) -> None:
    create(tmp_path).close()
    other = CONFIG.replace("0.1", "0.3").replace("low = 0.2", "high = 0.2").replace("= 20", "= 40")
    with pytest.raises(UserError) as caught:
        create(tmp_path, other, resume=True)
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/config.toml: the run cannot resume with another configuration. These keys differ:",
        "  algorithm.clip.high: absent in the run, 0.2 now",
        "  algorithm.clip.low: 0.2 in the run, absent now",
        "  optimizer.learning_rate: 0.1 in the run, 0.3 now",
        "Put them back, or start another run with --run.name=NAME. A key that is absent now because the command no longer has it "
        "can be deleted from that file.",
    ]


def test_resuming_may_run_on_and_save_otherwise(tmp_path: Path) -> None:
    create(tmp_path).close()
    other = CONFIG.replace("steps = 20", "steps = 40").replace("threads = 2", "threads = 1")
    other = other.replace("resume = false", "resume = true").replace("every_steps = 10", "every_steps = 5")
    create(tmp_path, other, resume=True).close()
    assert (tmp_path / "config.toml").read_text() == other


def test_a_broken_checkpoint_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=7, checkpoint=5)
    (tmp_path / "x" / "checkpoints" / "step_000005" / "model.safetensors").write_text("weighty")
    with pytest.raises(UserError, match=r"step_000005/model\.safetensors: its content is not the saved one"):
        create(tmp_path / "x", resume=True)
    assert read_metrics(tmp_path / "x")[-1]["step"] == 7
    (tmp_path / "x" / "checkpoints" / "step_000005" / "model.safetensors").write_text("weights")
    create(tmp_path / "x", resume=True).close()  # the refusal gave the lock back


@pytest.mark.parametrize("lost", ["the checkpoint", "and its links", "and their directory"])
def test_a_run_whose_checkpoints_are_gone_keeps_its_records(tmp_path: Path, lost: str) -> None:
    make_run(tmp_path / "x", steps=20, checkpoint=5)
    checkpoints = tmp_path / "x" / "checkpoints"
    shutil.rmtree(checkpoints if lost == "and their directory" else checkpoints / "step_000005")
    if lost == "and its links":
        (checkpoints / "latest").unlink()
    with pytest.raises(
        UserError, match=r"x/checkpoints: its checkpoints are gone, .* lose its 20 steps; put them back"
    ):
        create(tmp_path / "x", resume=True)
    assert [row["step"] for row in read_metrics(tmp_path / "x")] == list(range(1, 21))


def test_a_start_that_fails_leaves_nothing_that_blocks_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / ".notes").touch()

    def full(path: Path, content: bytes) -> None:
        if path.name == "provenance.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr("nmoe.runs.directory.write_atomically", full)
        for name in ("x", "y"):
            with pytest.raises(StorageError, match="No space left"):
                create(tmp_path / name)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["x", "x/.notes"]
    create(tmp_path / "y").close()


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_lost_provenance_is_named(tmp_path: Path, content: str | None) -> None:
    make_run(tmp_path, steps=5, checkpoint=5)
    (tmp_path / "provenance.json").unlink()
    if content is not None:
        (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(UserError, match=r"provenance\.json: .*; put back the file the run wrote"):
        create(tmp_path, resume=True)


# Opens a run and forks a worker that outlives it.
HOLD = """
import os, sys, time
from pathlib import Path
from nmoe.runs.directory import RunDirectory

run = RunDirectory.create(Path(sys.argv[1]), sys.argv[2], {"threads": 1}, resume=False)
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_two_processes_do_not_write_one_run_and_a_kill_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path), CONFIG], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(UserError, match=f"x: this run is being written by process {holder.pid}; "):
                create(path, resume=True)
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            create(path, resume=True).close()  # while the worker still lives
            os.kill(worker, 0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_run_open_in_this_process_is_locked_until_closed(tmp_path: Path) -> None:
    run = create(tmp_path)
    for resume in (False, True):
        with pytest.raises(UserError, match=f"this run is being written by process {os.getpid()}"):
            create(tmp_path, resume=resume)
    run.ledger.metrics(1, {"loss": 0.5})
    with pytest.raises(UserError, match=f"this run is being written by process {os.getpid()}"):
        create(tmp_path)
    run.close()
    run.close()
    create(tmp_path, resume=True).close()
