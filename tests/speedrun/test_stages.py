"""Stages of a pipeline: none that is done runs again, a broken one is begun again, and only the same pipeline goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nmoe.errors import UserError
from nmoe.speedrun.stages import Stages


class Killed(BaseException):
    pass


def pipeline(out: Path, did: list[str], resume: bool, killed_in: str = "", seed: int = 0) -> Stages:
    """Three stages, each of which leaves a file halfway and may then be killed."""
    stages = Stages(out, {"seed": seed}, resume)

    def work(name: str, figure: float) -> dict[str, float]:
        did.append(f"{name} after half of it" if (out / name).exists() else name)
        (out / name).touch()
        if name == killed_in:
            raise Killed
        return {"figure": figure}

    for figure, name in enumerate(("one", "two", "three")):
        stages.run(name, lambda name=name, figure=figure: work(name, figure))  # type: ignore[misc]
    return stages


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


def test_without_resume_a_pipeline_begins_again(tmp_path: Path) -> None:
    did: list[str] = []
    pipeline(tmp_path, did, resume=False)
    (tmp_path / "runs").mkdir()
    pipeline(tmp_path, did, resume=False, seed=1)
    assert did == ["one", "two", "three"] * 2
    assert not (tmp_path / "runs").exists()


def test_what_can_not_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stages\.json: not there, so there is nothing to resume"):
        pipeline(tmp_path, [], resume=True)
    assert list(tmp_path.iterdir()) == []
    pipeline(tmp_path, [], resume=False)
    for nowhere in (tmp_path / "stages.json" / "x", Path("/proc/x")):
        with pytest.raises(UserError, match=rf"{nowhere}: no directory can be made there; choose another --out"):
            pipeline(nowhere, [], resume=False)
    with pytest.raises(UserError, match=r'began with \{"seed": 0\}, which \{"seed": 1\} does not go on'):
        pipeline(tmp_path, [], resume=True, seed=1)
    (tmp_path / "stages.json").write_text(json.dumps({"settings": {"seed": 0}, "done": [{"name": "one"}]}))
    with pytest.raises(UserError, match=r"stages\.json: cannot be read: .*seconds"):
        pipeline(tmp_path, [], resume=True)
    assert (tmp_path / "one").exists()
