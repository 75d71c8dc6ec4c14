"""Probes that sample during runs on given examples: what is asked and when, that training does not notice, and exact resumption."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import figures, interrupted_at

from nmoe.config.commands import DPOConfig, PretrainConfig, SFTConfig
from nmoe.config.loader import load_environment, load_run
from nmoe.config.modes import mode_of
from nmoe.config.problems import ConfigError
from nmoe.config.toml import to_toml
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.probes import HeldOutProblems
from nmoe.model.checkpoint import load_model
from nmoe.recipes.dpo import dpo
from nmoe.recipes.pretrain import pretrain
from nmoe.recipes.sft import sft
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

CONFIG = """
[run]
name = "plain"
directory = "HERE/runs"
steps = 4
threads = 1

[model]
path = "BASE"

[records]
path = "HERE/RECORDS"
tokens_per_step = 300
held_out = 0.2

[optimizer]
learning_rate = 3e-3

[[eval]]
every_steps = 3

[checkpoint]
every_steps = 9
"""

PROBES = """
[[eval]]
environment.path = "ENVIRONMENT"
environment.task_pool.split = "eval"
every_steps = 4
samples = 2
temperature = 1.0
problems = 16
max_tokens = 20

[[eval]]
role = "out_of_distribution"
environment.path = "ENVIRONMENT"
environment.env_id = "beyond"
environment.task_pool.split = "eval"
every_steps = 2
problems = 12
max_tokens = 20
"""

Configure = Callable[..., Any]


def turn(digits: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant", "content": "back", "channel": "analysis"},
        {"role": "assistant", "content": digits, "channel": "final"},
    ]


def lines(chosen: Callable[[list[dict[str, str]], str], dict[str, Any]]) -> str:
    asked = [
        {"role": "user", "content": f"Reverse: {number}"} for number in range(102, 191) if number % 10 != number // 100
    ]
    return "".join(json.dumps(chosen([one], one["content"][-3:])) + "\n" for one in asked)


@pytest.fixture
def configure(workshop: Path, base: Path, tmp_path: Path) -> Configure:
    """A configuration over conversations or pairs that teach to reverse, with the two probes of PROBES or without."""
    sft_lines = lines(lambda asked, digits: {"messages": [*asked, *turn(digits[::-1])]})
    pairs = lines(lambda asked, digits: {"prompt": asked, "chosen": turn(digits[::-1]), "rejected": turn(digits)})
    (tmp_path / "SFTConfig.jsonl").write_text(sft_lines)
    (tmp_path / "DPOConfig.jsonl").write_text(pairs)

    def made(schema: type[Any], *overrides: str, probed: bool = True) -> Any:
        text = CONFIG.replace("RECORDS", f"{schema.__name__}.jsonl") + (PROBES if probed else "")
        text = text.replace("HERE", str(tmp_path)).replace("BASE", str(base))
        file = tmp_path / "run.toml"
        file.write_text(text.replace("ENVIRONMENT", str(workshop / "reverse.toml")))
        return load_run(file, schema, overrides)

    return made


def evaluations(run: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_text())["results"] for path in sorted((run / "eval").iterdir())]


def checkpoint(run: Path) -> dict[str, bytes]:
    found = resolve_checkpoint(run)
    return {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()}


def test_probes_are_asked_in_their_own_periods_and_training_does_not_notice(configure: Configure) -> None:
    plain = sft(configure(SFTConfig, probed=False))
    probed = sft(configure(SFTConfig, "--run.name=probed"))
    assert figures(read_metrics(probed)) == figures(read_metrics(plain))
    assert checkpoint(probed) == checkpoint(plain)
    found = evaluations(probed)
    loss, beyond = ("held_out_loss", None), ("greedy_pass@1", "out_of_distribution")
    sampled = [(mode, "in_distribution") for mode in ("sampling_pass@2", "sampling_pass@1", "pass@2")]
    assert [[(one["mode"], one.get("role")) for one in results] for results in found] == [
        [loss, beyond, *sampled],
        [beyond],
        [loss],
        [loss, beyond, *sampled],
    ]
    assert [one for results in found for one in results if one["mode"] == "held_out_loss"] == [
        one for results in evaluations(plain) for one in results
    ]
    start, _, _, last = found
    assert not any("since_start" in one for one in start)
    assert all("since_start" in one for one in last)
    difference = last[1]["value"] - start[1]["value"]
    assert last[1]["since_start"]["difference"] == pytest.approx(difference, abs=1e-12)
    log = (probed / "log.txt").read_text()
    assert f"step 4: held-out loss {last[0]['value']:.4f}" in log
    assert f"; out of distribution greedy_pass@1 on beyond {last[1]['value']:.1%}" in log
    assert "evaluation: before step 1, every 2 steps, at the end = 3 times beyond, 12 problems" in log


def test_a_probe_samples_the_weights_of_its_step(configure: Configure, workshop: Path) -> None:
    """Against an engine of its own on the saved checkpoint."""
    run = sft(configure(SFTConfig))
    settings = load_environment(workshop / "reverse.toml")
    pool = settings.task_pool.model_copy(update={"split": "eval"})
    environment = Environment.from_settings(
        settings.model_copy(update={"task_pool": pool}), Tokenizer.load(run / "checkpoints/step_000004")
    )
    with ExitStack() as stack:
        tools = stack.enter_context(ToolRuntime(environment, configure(SFTConfig).sandbox))
        mode = mode_of(None, 2, 1.0)
        asked = HeldOutProblems(environment, tools, problems=16, mode=mode, max_new_tokens=20, seed=0)
        expected = asked.evaluate(NativeEngine(load_model(run / "checkpoints/step_000004"), 256), 64)
    start, *_, last = evaluations(run)
    found = {one["mode"]: one["outcomes"] for one in last if one["dataset"] == "reverse"}
    assert found == {one.mode: one.outcomes for one in expected}
    assert found != {one["mode"]: one["outcomes"] for one in start if one["dataset"] == "reverse"}
    # The held-out loss, asked at step 3, has no say beside a probe out of the distribution.
    outside = {2: evaluations(run)[1][0]["value"], 4: last[1]["value"]}
    best = max(outside, key=lambda step: (outside[step], step))
    assert (run / "checkpoints/best").resolve().name == f"step_{best:06}"


def test_an_interrupted_run_goes_on_with_the_same_answers(configure: Configure) -> None:
    whole = sft(configure(SFTConfig, "--run.name=whole"))
    with interrupted_at(3):
        sft(configure(SFTConfig, "--run.name=part"))
    part = sft(configure(SFTConfig, "--run.name=part", "--run.resume=true"))
    assert figures(read_metrics(part)) == figures(read_metrics(whole))
    assert evaluations(part) == evaluations(whole)
    assert checkpoint(part) == checkpoint(whole)


def test_a_probe_ends_the_run(configure: Configure) -> None:
    """The base solves enough from the start: the first evaluation of that probe ends the run, no earlier one of another table."""
    options = ("--eval.2.enough=0.05", "--eval.1.every_steps=9")
    run = sft(configure(SFTConfig, *options))
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
    assert "step 2: ends here, since every source is solved at 5% or more" in (run / "log.txt").read_text()
    again = sft(configure(SFTConfig, *options, "--run.resume=true"))
    assert [row["step"] for row in read_metrics(again)] == [1, 2]


def test_dpo_and_pretraining_ask_them_too(configure: Configure, workshop: Path, tmp_path: Path) -> None:
    only = ("--run.steps=1", "--eval.1.every_steps=9", "--eval.2.problems=3")
    modes = ["sampling_pass@2", "sampling_pass@1", "pass@2"]
    found = evaluations(dpo(configure(DPOConfig, *only)))
    assert [[one["mode"] for one in results] for results in found] == [["pair_accuracy", "greedy_pass@1", *modes]] * 2
    where = f"--eval.0.environment.path={workshop / 'reverse.toml'}"
    alone = ("--eval=[]", where, "--eval.0.max_tokens=20", "--eval.0.problems=3", "--data.held_out_documents=0")
    run = (f"--run.directory={tmp_path}", "--run.steps=1", "--optimizer.warmup_steps=0")
    found = evaluations(pretrain(load_run(workshop / "base.toml", PretrainConfig, [*run, *alone])))
    assert [[(one["mode"], one["problems"]) for one in results] for results in found] == [[("greedy_pass@1", 3)]] * 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--eval.0.mode=greedy_pass@1"],
            r"mode.*is of a probe, which samples; name its environment, or leave this out",
        ),
        (["--eval.3.every_steps=5"], r"eval\[3\].*one set, evaluated in one way; leave out all \[\[eval\]\] but one"),
        (
            ["--eval.2.environment.env_id=reverse", "--eval.2.temperature=0.5"],
            r"its results look like those from \[eval\[1\]\]",
        ),
        (["--eval.1.reasoning_effort=low", "--eval.1.environment.format=boxed"], "plain text has no place for it"),
        (["--records.held_out=0.0"], r"\[eval\[0\]\] every_steps = 3: nothing to evaluate on"),
    ],
)
def test_tables_that_say_nothing(configure: Configure, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(SFTConfig, *overrides)


def test_a_probe_has_a_token_limit(workshop: Path) -> None:
    where = f"--eval.0.environment.path={workshop / 'reverse.toml'}"
    with pytest.raises(ConfigError, match=r"max_tokens.*is required beside an environment"):
        load_run(workshop / "base.toml", PretrainConfig, [where])
    with pytest.raises(
        ConfigError, match=r"max_tokens=64: leaves no room for a prompt in model.shape.context_tokens = 64"
    ):
        load_run(workshop / "base.toml", PretrainConfig, [where, "--eval.0.max_tokens=64"])


def test_tables_of_probes_without_a_probe(configure: Configure) -> None:
    with pytest.raises(
        ConfigError, match=r"engine.*is of probes, which sample, and no \[\[eval\]\] names an environment"
    ):
        configure(SFTConfig, "--engine.cache_mb=9", probed=False)
    assert configure(SFTConfig, "--engine.cache_mb=9").engine.cache_mb == 9


def test_a_recorded_configuration_is_read_again(configure: Configure, tmp_path: Path) -> None:
    """A table without an environment is written without the keys of a probe, which are refused there."""
    config = configure(SFTConfig)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_run(tmp_path / "again.toml", SFTConfig, []) == config
    assert config.model_dump()["eval"][0] == {"every_steps": 3, "allow_trained_on": False}
    assert not {"engine", "sandbox"} & configure(SFTConfig, probed=False).model_dump().keys()
