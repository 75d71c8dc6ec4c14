"""What a path to a model stands for: of a run the newest checkpoint, of a speedrun's directory the best one of RL."""

import shutil
from pathlib import Path

import pytest

from nmoe.errors import UserError
from nmoe.runs.checkpoint import best_checkpoint, mark_best
from nmoe.runs.resolve import maker_of, resolve_checkpoint


def checkpoints(run: Path, *steps: int) -> Path:
    for step in steps:
        checkpoint = run / f"checkpoints/step_{step:06}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
    return run / "checkpoints"


def test_a_run_stands_for_its_newest_checkpoint_though_another_is_best(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "run", 20, 40)
    mark_best(saved / "step_000020")
    assert resolve_checkpoint(tmp_path / "run") == saved / "step_000040"


def test_a_speedruns_directory_stands_for_the_best_checkpoint_of_its_rl(tmp_path: Path) -> None:
    """The last steps of RL may lose what earlier ones had: 92.4% after 97.2% of the same 1,200 problems was measured."""
    saved = checkpoints(tmp_path / "speedrun/rl", 140, 160, 200)
    mark_best(saved / "step_000160")
    assert resolve_checkpoint(tmp_path / "speedrun") == saved / "step_000160"
    assert resolve_checkpoint(tmp_path / "speedrun/rl") == saved / "step_000200"


@pytest.mark.parametrize("rolled_back", [False, True], ids=["never-evaluated", "its-best-removed"])
def test_without_a_best_checkpoint_it_stands_for_the_newest(tmp_path: Path, rolled_back: bool) -> None:
    saved = checkpoints(tmp_path / "speedrun/rl", 20, 40)
    if rolled_back:
        mark_best(saved / "step_000040")
        shutil.rmtree(saved / "step_000040")
    assert best_checkpoint(saved) is None
    assert resolve_checkpoint(tmp_path / "speedrun") == saved / ("step_000020" if rolled_back else "step_000040")


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "speedrun/rl/checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="neither a checkpoint"):
        resolve_checkpoint(tmp_path / "speedrun")


def test_what_is_missing_is_made_by_a_command_that_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    last = "a command in the first lines of the configuration that asks for it"
    for begun in (False, True):
        extends = " --resume" if begun else ""
        for name, said in (
            ("base", f"; `nmoe speedrun` makes it, or {last}"),
            ("selfplay_roles", f"; `nmoe speedrun --full{extends}` makes it, or {last}"),
            ("verifier/checkpoints/best", f"; `nmoe speedrun --full{extends}` makes it, or {last}"),
            ("sort_grpo", f"; {last} makes it"),
        ):
            assert maker_of(Path("runs/speedrun") / name) == said
        Path("runs/speedrun").mkdir(parents=True, exist_ok=True)
        Path("runs/speedrun/stages.json").touch()
    assert maker_of(Path("runs/other")) == ""
