"""Stages of a pipeline: none that is done runs again, a broken one is begun again, and nothing that they did not make is lost."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nmoe.errors import StorageError, UserError
from nmoe.runs.directory import RunDirectory
from nmoe.runs.replace import delete
from nmoe.runs.storage import storage_errors
from nmoe.speedrun.scratch import Scratch
from nmoe.speedrun.stages import Stage, Stages

PLAIN, FULL = ("one", "two", "three"), ("one", "added", "two", "three")


class Killed(BaseException):
    pass


def pipeline(
    out: Path,
    did: list[str],
    resume: bool,
    killed_in: str = "",
    seed: int = 0,
    names: Sequence[str] = PLAIN,
    replace: bool = False,
) -> Stages:
    """Stages that each leave a file halfway and may then be killed. The last one starts from the added stage, if there is one."""
    full = "added" in names

    def work(name: str, figure: float) -> Mapping[str, float]:
        did.append(f"{name} after half of it" if (out / name).exists() else name)
        (out / name).write_text(f"{name} of {seed}{' from added' if full else ''}")
        if name == killed_in:
            raise Killed
        return {"figure": figure}

    plan = [
        Stage(
            name,
            lambda name=name, figure=figure: work(name, figure),
            (name,),
            "added" if full and name == "three" else "",
        )  # type: ignore[misc]
        for figure, name in enumerate(names)
    ]
    with Stages(out, plan, {"seed": seed, "full": full}, resume, replace, ("report",)) as stages:
        stages.run()
        stages.report(lambda: (out / "report").write_text(" ".join(names)))
    return stages


def a_run(path: Path, argv: Sequence[str] = ("nmoe", "rl", "train", "sort_grpo")) -> RunDirectory:
    run = RunDirectory.create(path, "[run]\nsteps = 1\n", {"argv": list(argv)}, resume=False)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


def content(out: Path) -> dict[str, str]:
    names = (*FULL, "report", "mine/metrics.jsonl", "added/metrics.jsonl")
    return {name: (out / name).read_text() for name in names if (out / name).is_file()}


def test_what_is_done_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    did: list[str] = []
    for _ in range(2):
        with pytest.raises(Killed):
            pipeline(tmp_path / "out", did, resume=bool(did), killed_in="two")
    stages = pipeline(tmp_path / "out", did, resume=True)
    assert did == ["one", "two", "two after half of it", "two after half of it", "three"]
    assert [(stage.name, stage.attempts, stage.figures) for stage in stages.done] == [
        ("one", 1, {"figure": 0}),
        ("two", 3, {"figure": 1}),
        ("three", 1, {"figure": 2}),
    ]
    assert "== one: done before" in capsys.readouterr().out
    pipeline(tmp_path / "out", did, resume=True)
    assert len(did) == 5


@pytest.mark.parametrize("killed_in", ["", "two"])
def test_without_resume_a_pipeline_replaces_what_it_made_and_nothing_else(tmp_path: Path, killed_in: str) -> None:
    did: list[str] = []
    try:
        pipeline(tmp_path, did, resume=False, killed_in=killed_in)
    except Killed:
        did.append("three")
    a_run(tmp_path / "mine").close()
    (tmp_path / "notes.md").write_text("mine")
    pipeline(tmp_path, did, resume=False, seed=1)
    assert did == ["one", "two", "three"] * 2
    assert content(tmp_path) == {
        **{name: f"{name} of 1" for name in PLAIN},
        "report": "one two three",
        "mine/metrics.jsonl": '{"step": 1}\n',
    }
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_a_plain_pipeline_is_extended(tmp_path: Path) -> None:
    did: list[str] = []
    pipeline(tmp_path, did, resume=False)
    a_run(tmp_path / "mine").close()
    with pytest.raises(Killed):
        pipeline(tmp_path, did, resume=True, killed_in="added", names=FULL)
    assert (tmp_path / "three").read_text() == "three of 0", "kept until the stage that replaces it begins"
    stages = pipeline(tmp_path, did, resume=True, names=FULL)
    assert did[3:] == ["added", "added after half of it", "three"]
    assert [stage.name for stage in stages.done] == ["one", "two", "added", "three"]
    assert content(tmp_path) == {
        "one": "one of 0",
        "two": "two of 0",
        "added": "added of 0 from added",
        "three": "three of 0 from added",
        "report": "one added two three",
        "mine/metrics.jsonl": '{"step": 1}\n',
    }
    with pytest.raises(
        UserError, match=r'was started with \{"seed": 0, "full": true\}, not with .*; --resume needs the same options'
    ):
        pipeline(tmp_path, did, resume=True)


@pytest.mark.parametrize("gone", ["removed by hand", "replaced by consent", "deleted before an interruption"])
def test_a_stage_that_is_done_again_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    did: list[str] = []
    pipeline(tmp_path, did, resume=False)
    if gone == "removed by hand":
        (tmp_path / "three").unlink()
    elif gone == "replaced by consent":
        (tmp_path / "three").write_text("edited")
    else:

        def delete_and_die(paths: Sequence[Path], remedy: str) -> None:
            delete(paths, remedy)
            if paths:
                raise Killed

        with monkeypatch.context() as patched:
            patched.setattr("nmoe.speedrun.stages.delete", delete_and_die)
            with pytest.raises(Killed):
                pipeline(tmp_path, did, resume=True, names=FULL)
        assert not (tmp_path / "three").exists()
    stages = pipeline(tmp_path, did, resume=True, names=FULL, replace=True)
    assert [(stage.name, stage.start) for stage in stages.done][2:] == [("added", ""), ("three", "added")]
    recorded = json.loads((tmp_path / "stages.json").read_text())["done"]
    assert [stage["name"] for stage in recorded] == ["one", "two", "added", "three"]


def test_a_replacement_that_is_killed_leaves_no_stage_that_counts_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    pipeline(tmp_path, did, resume=False)

    def delete_one_and_die(paths: Sequence[Path], remedy: str) -> None:
        delete(paths[:1], remedy)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("nmoe.speedrun.stages.delete", delete_one_and_die)
        with pytest.raises(Killed):
            pipeline(tmp_path, did, resume=False)
    assert [name for name in PLAIN if not (tmp_path / name).exists()] == ["one"]
    stages = pipeline(tmp_path, did, resume=True)
    assert did == ["one", "two", "three", "one"]
    assert {stage.name for stage in stages.done} == set(PLAIN) == set(content(tmp_path)) - {"report"}


def test_a_stage_of_which_a_part_is_gone_is_done_again_as_a_whole(tmp_path: Path) -> None:
    did: list[list[str]] = []

    def work() -> Mapping[str, float]:
        did.append(sorted(name for name in ("a", "b") if (tmp_path / name).exists()))
        for name in ("a", "b"):
            (tmp_path / name).write_text(name)
        return {}

    for resume in (False, True, True):
        with Stages(tmp_path, [Stage("both", work, ("a", "b"))], {}, resume) as stages:
            stages.run()
        (tmp_path / "a").unlink(missing_ok=True)
    assert did == [[], [], []], "b of the first attempt is removed before the second"


@pytest.mark.parametrize("names", [PLAIN, FULL])
def test_a_changed_run_of_a_stage_is_named_and_replaced_by_consent(tmp_path: Path, names: Sequence[str]) -> None:
    did: list[str] = []

    def stages(resume: bool, full: bool = names is FULL, replace: bool = False) -> None:
        def work() -> Mapping[str, float]:
            did.append("rl")
            return a_run(tmp_path / "rl").close() or {}

        plan = [Stage("reinforcement", work, ("rl",), "added" if full else "")]
        with Stages(tmp_path, plan, {"seed": 0, "full": full}, resume, replace) as opened:
            opened.run()

    stages(False, full=False)
    (tmp_path / "rl/my_notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"in the way\. A speedrun did not make .* changed afterwards:\n  .*/rl\nMove"):
        stages(True)
    assert ((tmp_path / "rl/my_notes.txt").exists(), did) == (True, ["rl"])
    stages(True, replace=True)
    assert ((tmp_path / "rl/my_notes.txt").exists(), did) == (False, ["rl", "rl"])


def test_what_full_would_extend_is_replaced_by_consent_only(tmp_path: Path) -> None:
    did: list[str] = []
    pipeline(tmp_path, did, resume=False)
    before = content(tmp_path)
    with pytest.raises(UserError) as refused:
        pipeline(tmp_path, did, resume=False, names=FULL)
    assert str(refused.value).splitlines() == [
        f"{tmp_path} holds a speedrun without the added stages, which --full --resume adds. Without --resume it begins again, "
        "and these paths are deleted:",
        *(f"  {tmp_path}/{name}" for name in ("one", "two", "three", "report")),
        "Move them, name another directory with --out, or pass --replace to delete them",
    ]
    assert (content(tmp_path), len(did)) == (before, 3)
    pipeline(tmp_path, did, resume=False, names=FULL, replace=True)
    assert did[3:] == ["one", "added", "two", "three"]


def test_what_was_broken_off_is_replaced_by_consent_only(tmp_path: Path) -> None:
    did: list[str] = []
    with pytest.raises(Killed):
        pipeline(tmp_path, did, resume=False, killed_in="one")
    with pytest.raises(Killed):  # no stage was done, so that nothing is lost
        pipeline(tmp_path, did, resume=False, killed_in="two")
    before = content(tmp_path)
    with pytest.raises(UserError) as refused:
        pipeline(tmp_path, did, resume=False)
    assert str(refused.value).splitlines() == [
        f"{tmp_path} holds a speedrun that was broken off, and --resume goes on with it. Without --resume it begins again, and "
        "these paths are deleted:",
        *(f"  {tmp_path}/{name}" for name in ("one", "two")),
        "Move them, name another directory with --out, or pass --replace to delete them",
    ]
    assert (content(tmp_path), did) == (before, ["one", "one", "two"])
    pipeline(tmp_path, did, resume=False, replace=True)
    assert did[3:] == ["one", "two", "three"]


def test_a_stage_says_how_to_go_on_with_the_pipeline(tmp_path: Path) -> None:
    def full() -> Mapping[str, float]:
        with storage_errors(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return {}

    with (
        Stages(tmp_path, [Stage("base", full, ("base",))], {}, False) as stages,
        pytest.raises(StorageError, match=r"from its last checkpoint with the same options and --resume\.$"),
    ):
        stages.run()
    with pytest.raises(StorageError, match=r"from its last checkpoint with --run\.resume=true\.$"):
        full()


def test_a_stage_killed_before_the_extension_begins_again_from_its_new_start(tmp_path: Path) -> None:
    did: list[str] = []
    with pytest.raises(Killed):
        pipeline(tmp_path, did, resume=False, killed_in="three")
    stages = pipeline(tmp_path, did, resume=True, names=FULL)
    assert did == ["one", "two", "three", "added", "three"]
    assert [stage.attempts for stage in stages.done] == [1, 1, 1, 1], "the attempts are those at the stage itself"


def test_what_a_speedrun_did_not_make_is_named_and_kept_without_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    did: list[str] = []
    pipeline(tmp_path, did, resume=False)
    a_run(tmp_path / "added").close()  # by the user, under the name of a stage to come
    (tmp_path / "three").write_text("edited")
    before = content(tmp_path)
    for resume in (False, True):
        with pytest.raises(UserError) as refused:
            pipeline(tmp_path, did, resume=resume, names=FULL)
        assert refused.value.exit_code == 2
        assert str(refused.value).splitlines() == [
            "These paths are in the way. A speedrun did not make them, or they changed afterwards:",
            f"  {tmp_path}/added",
            f"  {tmp_path}/three",
            "Move them, name another directory with --out, or pass --replace to delete them",
        ]
    assert (content(tmp_path), len(did)) == (before, 3)
    ask = input
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda asked: "" if asked == "Delete them? [y/N] " else "y")
    with pytest.raises(UserError, match=r"^nothing was deleted$"):
        pipeline(tmp_path, did, resume=True, names=FULL)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # Ctrl-D
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    with pytest.raises(UserError, match=r"^nothing was deleted$"):
        pipeline(tmp_path, did, resume=True, names=FULL)
    assert (content(tmp_path), len(did)) == (before, 3)
    capsys.readouterr()
    pipeline(tmp_path, did, resume=True, names=FULL, replace=True)
    assert did[3:] == ["added", "three"]
    assert f"replacing {tmp_path}/added\nreplacing {tmp_path}/three\n" in capsys.readouterr().out


def test_a_killed_stage_that_was_finished_by_hand_is_the_users(tmp_path: Path) -> None:
    for argv, refused in ((("nmoe", "speedrun"), False), (("nmoe", "rl", "train", "speedrun"), True)):
        out = tmp_path / str(refused)

        def work(out: Path = out, argv: Sequence[str] = argv) -> Mapping[str, float]:
            a_run(out / "rl", argv).close()
            raise Killed

        def begin(out: Path = out, work: Any = work) -> None:
            with Stages(out, [Stage("rl", work, ("rl",))], {}, False) as stages:
                stages.run()

        with pytest.raises(Killed):
            begin()
        with pytest.raises(UserError if refused else Killed):
            begin()


HOLD = """
import sys, time
from pathlib import Path
from nmoe.runs.directory import RunLock
from nmoe.runs.running import LOCK
lock = RunLock(Path(sys.argv[1]) / sys.argv[2])
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("held", "lock"), [("two", ".lock"), ("", ".speedrun")])
def test_what_another_process_writes_is_not_touched(tmp_path: Path, held: str, lock: str) -> None:
    did: list[str] = []
    stage = Stage("two", lambda: (a_run(tmp_path / "two").close(), {})[1], ("two",))  # type: ignore[func-returns-value]

    def begin() -> None:
        with Stages(tmp_path, [stage], {"seed": 0}, False) as stages:
            stages.run()
            did.append("done")

    begin()
    before = sorted(path for path in tmp_path.rglob("*"))
    command = [sys.executable, "-c", HOLD, str(tmp_path / held), lock]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            where = str(tmp_path / held).rstrip("/")
            with pytest.raises(
                UserError, match=rf"^{where}: this run is being written by process {holder.pid}; .* with --out$"
            ):
                begin()
        finally:
            holder.kill()
    assert sorted(path for path in tmp_path.rglob("*")) == before
    begin()
    assert did == ["done", "done"]


def test_a_run_that_cannot_be_locked_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path / "rl").close()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", refused)
    with pytest.raises(StorageError, match=rf"^{tmp_path}/rl/\.lock: cannot be written: Permission denied"):
        delete([tmp_path / "rl"], "stop it")
    assert (tmp_path / "rl/metrics.jsonl").exists()


def test_what_can_not_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stages\.json: not there, so there is nothing to resume"):
        pipeline(tmp_path, [], resume=True)
    assert list(tmp_path.iterdir()) == []
    pipeline(tmp_path, [], resume=False)
    for nowhere in (tmp_path / "stages.json" / "x", Path("/proc/x")):
        with pytest.raises(UserError, match=rf"{nowhere}: no directory can be made there; choose another --out"):
            pipeline(nowhere, [], resume=False)
    with pytest.raises(
        UserError, match=r'was started with \{"seed": 0, "full": false\}, not with \{"seed": 1, .* same options'
    ):
        pipeline(tmp_path, [], resume=True, seed=1)
    (tmp_path / "stages.json").write_text(json.dumps({"settings": {"seed": 0}, "done": [{"name": "one"}]}))
    with pytest.raises(UserError, match=r"stages\.json: cannot be read: .*seconds"):
        pipeline(tmp_path, [], resume=True)
    with pytest.raises(UserError, match=r"did not make them, or they changed afterwards:\n  .*/one\n"):
        pipeline(tmp_path, [], resume=False)
    assert (tmp_path / "one").exists()


def test_the_speedruns_stages_make_no_file_twice_and_are_extended_at_reinforcement_learning(tmp_path: Path) -> None:
    plain, full = (Scratch(tmp_path, 0, full, False).stages() for full in (False, True))
    for plan in (plain, full):
        names = [name for stage in plan for name in stage.makes]
        assert len(set(names)) == len(names)
    keys = {(stage.name, stage.start, stage.makes) for stage in full}
    again = [stage.name for stage in plain if (stage.name, stage.start, stage.makes) not in keys]
    assert again == ["reinforcement learning", "evaluation"]
    assert {name for stage in plain for name in stage.makes} == {
        *("tokenizer", "corpus.jsonl", "tools.jsonl", "stages.jsonl", "prm800k", "problems.json", "sums.jsonl"),
        *("base", "rl", "examinations.json"),
    }


@pytest.mark.parametrize(("arguments", "said"), [((), True), (("interrupted: saved step 4",), False)])
def test_an_interrupted_stage_says_how_to_go_on_unless_its_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: bool
) -> None:
    def work() -> Mapping[str, float]:
        raise KeyboardInterrupt(*arguments)

    plan = [Stage("evaluation", work, ("one",))]
    with (
        Stages(tmp_path / "out", plan, {"seed": 0, "full": False}, resume=False) as stages,
        pytest.raises(KeyboardInterrupt),
    ):
        stages.run()
    line = "interrupted: evaluation is not done; go on with the same options and --resume"
    assert (line in capsys.readouterr().out.splitlines()) == said
