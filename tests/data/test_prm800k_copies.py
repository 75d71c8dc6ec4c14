"""PRM800K where it really lies: files of the repository on GitHub, and the mirror on the hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from nmoe.cli import main
from nmoe.data import hub
from nmoe.data.prm import PRM800K, read_source
from nmoe.errors import UserError
from nmoe.rl.__main__ import rl, run


def record(problem: str, *steps: tuple[str, int], reason: str = "solution", phase: int = 2) -> str:
    """A line of PRM800K, with all its keys."""
    told = [
        {
            "completions": [{"text": text, "rating": rating, "flagged": False}],
            "human_completion": None,
            "chosen_completion": 0 if rating != -1 else None,
        }
        for text, rating in steps
    ]
    question: dict[str, Any] = {"problem": problem, "ground_truth_answer": "4"}
    if phase == 2:
        question |= {
            "ground_truth_solution": None,
            "pre_generated_steps": [text for text, _ in steps],
            "pre_generated_answer": "4",
            "pre_generated_verifier_score": 0.5,
        }
    whole = {
        "labeler": "340d89bc-f5b7-45e9-b272-909ba68ee363",
        "timestamp": "2023-01-22T04:34:27.052924",
        "generation": 9 if phase == 2 else None,
        "is_quality_control_question": False,
        "is_initial_screening_question": False,
        "question": question,
        "label": {"steps": told, "total_time": 278270, "finish_reason": reason},
    }
    return json.dumps(whole) + "\n"


def write(directory: Path) -> Path:
    """The four files of the repository's prm800k/data."""
    directory.mkdir(parents=True)
    for phase in (1, 2):
        for split in ("train", "test"):
            lines = [
                record(f"{split} {phase}.{n}: 2 + 2?", ("Two and two.", 1), ("So 4.", 1), phase=phase) for n in range(6)
            ]
            lines.append(record(f"{split} {phase}: wrong", ("So 5.", -1), reason="found_error", phase=phase))
            (directory / f"phase{phase}_{split}.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture
def datasets_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "kept"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def problems(split: str, place: str = PRM800K) -> list[str]:
    return [one.problem for one in read_source("prm800k", split, place, "", "+").solutions]


@pytest.mark.parametrize(
    "layout",
    [
        "kept/tasksource/PRM800K",  # nmoe data download tasksource/PRM800K
        "kept/tasksource/PRM800K/data",
        "kept/openai/prm800k/prm800k/data",  # git clone of the repository, below $NMOE_DATASETS
        "kept/prm800k",
        "prm800k/prm800k/data",  # git clone in the working directory
    ],
)
@pytest.mark.parametrize("place", [PRM800K, "openai/prm800k"])
def test_both_phases_are_read_wherever_a_copy_lies(datasets_here: Path, layout: str, place: str) -> None:
    write(datasets_here / layout)
    assert [name.partition(":")[0] for name in problems("train", place)] == [
        *(f"train 1.{n}" for n in range(6)),
        "train 1",
        *(f"train 2.{n}" for n in range(6)),
        "train 2",
    ]
    assert len(problems("test")) == 14
    # Rows count from the first phase on.
    assert [name.partition(":")[0] for name in problems("train[6:8]")] == ["train 1", "train 2.0"]
    with pytest.raises(UserError, match=r"no file of either phase for that split; there are .*phase1_test.jsonl"):
        problems("validation")


def test_the_files_of_the_mirror_are_fetched_and_read_as_lines(
    datasets_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, asked = write(datasets_here / "cache"), []

    def snapshot(name: str, **settings: Any) -> str:
        asked.append((name, settings["repo_type"], settings["allow_patterns"]))
        return str(files)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert len(problems("train")) == 14
    assert asked == [("tasksource/PRM800K", "dataset", ["*phase[12]_*.jsonl"])]


def test_why_the_hub_does_not_give_the_mirror_is_said(datasets_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, **_: Any) -> str:
        raise ConnectionError(f"401 Client Error: {name} wants a token")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "unreachable", lambda: None)
    with pytest.raises(
        UserError, match=r"hub did not give it: 401 Client Error: tasksource/PRM800K wants a token; fetch"
    ):
        problems("train")


def test_without_a_network_the_mirror_is_looked_for_in_the_cache_alone(
    datasets_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, offline = write(datasets_here / "cache"), []

    def snapshot(name: str, **_: Any) -> str:
        offline.append(constants.HF_HUB_OFFLINE)
        return str(files)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "unreachable", lambda: "huggingface.co cannot be reached")
    assert len(problems("train")) == 14
    assert (offline, constants.HF_HUB_OFFLINE) == ([True], False)


def test_what_is_nowhere_is_named_with_the_command_that_fetches_it(datasets_here: Path) -> None:
    with pytest.raises(UserError, match=r"dataset 'tasksource/PRM800K'.*nmoe data download tasksource/PRM800K"):
        problems("train")
    pointer = datasets_here / "prm800k" / "prm800k" / "data"
    pointer.mkdir(parents=True)
    (pointer / "phase1_train.jsonl").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
    )
    with pytest.raises(UserError, match=r"phase1_train.jsonl:1: a pointer of Git LFS .* `git lfs pull`"):
        problems("train")


MODEL = """
[model]
tokenizer = "bytes"
shape = {hidden_size = 16, layers = 1, heads = 2, kv_heads = 2, head_dim = 8, intermediate_size = 32, context_tokens = 8192}
[run]
threads = 1
"""


@pytest.mark.parametrize("layout", ["kept/tasksource/PRM800K", "kept/openai/prm800k/prm800k/data"])
def test_the_documents_two_commands_run_on_a_copy(
    datasets_here: Path, layout: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(datasets_here / layout)
    Path("verifier.toml").write_text(f"{MODEL}steps = 2\n")
    Path("selfplay.toml").write_text(
        f"{MODEL}[sampling]\nmax_new_tokens = 4\n[batch]\nprompts_per_step = 14\ngroup_size = 1\n"
        "[selfplay]\nverifications = 1\nmeta_verifications = 1\nconfirmations = 1\n"
    )

    def ran(command: Callable[[], None], *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["nmoe", *arguments])
        with pytest.raises(SystemExit) as ended:
            command()
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said.out

    arguments = ("verifier", "verifier.toml", "--prm_source=prm800k", "--prm_split=train[:1024]")
    assert "labelled '+'" in ran(lambda: run(rl, "python -m nmoe.rl"), *arguments)
    arguments = ("selfplay", "selfplay.toml", "--problem_source=prm800k", "--output_dir=./mathv2_output")
    said = ran(main, "rl", *arguments, "--max_problems=1000", "--replay_sample_rate=0.1")
    assert "prm800k: 14 records, 0 of them duplicates" in said
    assert json.loads(Path("mathv2_output/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
