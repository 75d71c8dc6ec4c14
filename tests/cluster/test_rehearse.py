"""`nmoe rehearse` names mistakes of a configuration. They were listed in `.ci/rehearsed.py` before it was built."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_models import FAMILIES

from nmoe.cluster.rehearse.rehearse import checks
from nmoe.cluster.rehearse.small import small_shape
from nmoe.cluster.rehearse.trials import TRIALS, Rehearsal
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.engine.remote.supervisor import Restarts
from nmoe.errors import StorageError, UserError
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.preflight.check import Check

MISTAKES = runpy.run_path(str(Path(__file__).parents[2] / ".ci/rehearsed.py"))["MISTAKES"]
RUN = """
[run]
name = "placed"
directory = "{directory}"
steps = 10
[model]
tokenizer = "bytes"
[model.shape]
hidden_size = 64
layers = 2
heads = 4
kv_heads = 2
head_dim = 16
intermediate_size = 128
context_tokens = 512
[environment]
env_id = "sorted"
format = "harmony"
[environment.task_pool]
type = "generated"
task_type = "sort"
difficulty = [4, 6]
[engine]
kind = "server"
[placement]
engines = 2
[sampling]
max_new_tokens = 64
[batch]
prompts_per_step = 4
group_size = 4
[optimizer]
learning_rate = 1e-3
"""
EVALUATION = """
[[eval]]
every_steps = 5
[eval.environment]
env_id = "held_out"
format = "harmony"
[eval.environment.task_pool]
type = "jsonl"
path = "not_there.jsonl"
task_type = "math"
problem_field = "input"
answer_field = "label"
"""
REWARD = """
[[environment.rewards]]
name = "mine"
type = "function"
call = "not_there:reward"
"""
TOOLS = """
[environment.tools]
use = ["python"]
"""


def found(directory: Path, more: str = "", overrides: Sequence[str] = (), gpus: int = 8) -> dict[str, Check]:
    """The checks by their names. A file that is refused has one, `file`."""
    file = directory / "run.toml"
    file.write_text(RUN.format(directory=directory / "runs") + more)
    try:
        config = load_run(file, RLConfig, overrides)
    except UserError as error:
        return {"file": Check("file", "fail", str(error))}
    return {check.name: check for check in checks(config, file, overrides, gpus, 80 * 2**30, directory / "scratch")}


def test_nothing_is_wrong_with_a_right_configuration(tmp_path: Path) -> None:
    assert {name: str(check) for name, check in found(tmp_path).items() if check.status != "ok"} == {}


@pytest.mark.parametrize(
    ("mistake", "more", "overrides", "name", "words"),
    [
        ("wrong key", "", ["--batch.promts_per_step=4"], "file", "prompts_per_step"),
        (
            "context too small",
            "",
            ["--model.shape.context_tokens=80"],
            "context",
            "do not fit the model's context of 80",
        ),
        ("grader missing", REWARD, [], "rehearsal", "importing not_there failed"),
        ("sandbox missing", TOOLS, [], "sandbox", "bwrap"),
        ("evaluation set missing", EVALUATION, [], "data", "not_there.jsonl"),
        ("batch not divisible", "", ["--batch.updates_per_step=3"], "batch parts", "make it 6"),
        (
            "staleness uncorrected",
            "",
            ["--async.max_staleness=4", "--algorithm.correction=none"],
            "staleness",
            "algorithm.correction is none",
        ),
        (
            "checkpoint directory",
            "",
            ["--model.shape.hidden_size=32768", "--model.shape.intermediate_size=131072", "--model.shape.layers=90"],
            "disk",
            "free on the disk",
        ),
        (
            "placement too large",
            "",
            ["--placement.learner_gpus=4", "--placement.engines=5"],
            "placement",
            "there are 8",
        ),
        (
            "token_s too small",
            "",
            ["--model.shape.context_tokens=8192", "--sampling.max_new_tokens=4096", "--engine.token_s=0.001"],
            "token_s",
            "set engine.token_s to 0.035",
        ),
        (
            "reward always equal",
            "[environment.rubric]\nformat = 1.0\ncorrectness = 0.0\n",
            [],
            "rewards",
            "nothing right would be learned",
        ),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
    more: str,
    overrides: list[str],
    name: str,
    words: str,
) -> None:
    assert mistake in MISTAKES
    if mistake == "sandbox missing":
        monkeypatch.setenv("PATH", str(tmp_path))
    check = found(tmp_path, more, overrides)[name]
    assert check.status != "ok"
    assert words in check.text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_small_keeps_its_features(family: str) -> None:
    full = ModelConfig(**FAMILIES[family])
    small = small_shape(full, 300)
    assert small.vocab_size == 300
    assert small.context_tokens == full.context_tokens
    for feature in ("sinks", "qk_norm", "gelu", "shared_gate", "attention_gate", "qkv_bias"):
        assert getattr(small, feature) == getattr(full, feature)
    assert (small.latent is None, small.delta is None, small.experts == 0) == (
        full.latent is None,
        full.delta is None,
        full.experts == 0,
    )
    Transformer(small).initialize(0)


def test_a_run_that_a_full_disk_has_ended_is_started_again_as_if_by_hand(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    rehearsal = object.__new__(Rehearsal)
    full = next(trial for trial in TRIALS if trial.name == "disk full")
    vars(rehearsal).update(_trial=full, _run=tmp_path, _restarts=Restarts(3), _began=0.0, _begun_from=-1)
    assert rehearsal._next_start(StorageError.exit_code, 1.0) == 0.0
    rehearsal._trial = None
    with pytest.raises(SystemExit) as ended:
        rehearsal._next_start(StorageError.exit_code, 1.0)
    assert ended.value.code == 2
