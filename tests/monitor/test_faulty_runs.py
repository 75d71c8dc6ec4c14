"""Runs that really have a fault: the rule for it fires within ten steps, and a resumed run says what an uninterrupted one says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nmoe
from nmoe.engine.api import Engine, Request
from nmoe.errors import DivergenceError, RunStoppedError
from nmoe.rl import update
from nmoe.types import Sample

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64}
PROMPTS = [{"prompt": text} for text in ("Sing.", "Hum.", "Call.", "Sigh.")]
SETTINGS: dict[str, Any] = {
    "run.steps": 40,
    "run.threads": 1,
    "sampling.max_new_tokens": 16,
    "batch": {"prompts_per_step": 4, "group_size": 8},
    "optimizer.learning_rate": 0.01,
    "monitor.truncation.level": "off",  # a new model does not know how to end
}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def vowels(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def short(completions: list[str], **columns: Any) -> list[float]:
    return [1 - len(text) / 16 for text in completions]


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [0.5 for _ in completions]


def alerts(run: Path) -> dict[str, int]:
    """The first step of each rule that fired."""
    first: dict[str, int] = {}
    for line in (run / "alerts.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("remedies"):
            first.setdefault(record["rule"], record["step"])
    return first


def test_a_token_limit_that_is_too_short() -> None:
    config = SETTINGS | {"run.steps": 6, "monitor.truncation.level": "warn"}
    run = nmoe.train_rl(TINY, PROMPTS, [vowels], config=config)
    assert alerts(run.path) == {"truncation": 5}
    record = json.loads((run.path / "alerts.jsonl").read_text().splitlines()[0])
    assert record["remedies"][0] == "raise sampling.max_new_tokens"


def test_a_reward_that_says_nothing() -> None:
    run = nmoe.train_rl(TINY, PROMPTS, [constant], config=SETTINGS | {"run.steps": 11})
    assert alerts(run.path) == {"reward_stuck": 10}


def test_a_reward_that_pays_for_short_answers_alone() -> None:
    run = nmoe.train_rl(TINY, PROMPTS, [short], config=SETTINGS)
    lengths = [row["response_length_mean"] for row in run.metrics]
    step = alerts(run.path)["length"]
    symptom = next(
        place for place, length in enumerate(lengths, start=1) if place > 5 and length < sum(lengths[:5]) / 15
    )
    assert step <= symptom + 10


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_engine_that_samples_at_another_temperature_than_the_learner_thinks(precision: str) -> None:
    async def colder(request: Request, engine: Engine) -> list[Sample]:
        return await engine.generate(replace(request, sampling=replace(request.sampling, temperature=0.3)))

    # With the default range the clip rule fires a step later, too.
    wide = {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}
    config = SETTINGS | wide | {"run.steps": 4, "model.precision": precision}
    healthy = nmoe.train_rl(TINY, PROMPTS, [vowels], config=config)
    assert not (healthy.path / "alerts.jsonl").exists()
    run = nmoe.train_rl(TINY, PROMPTS, [vowels], config=config, generate_fn=colder)
    assert alerts(run.path) == {"mismatch": 2}
    record = json.loads((run.path / "alerts.jsonl").read_text().splitlines()[0])
    assert not any("route_flips" in remedy for remedy in record["remedies"]), "the model is dense"


def test_a_metric_that_is_not_finite_ends_the_run_and_leaves_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    found = update.effect
    monkeypatch.setattr(update, "effect", lambda *of: found(*of) | ({"update_kl": math.nan} if of[-1] == 2 else {}))
    with pytest.raises(DivergenceError, match=r"^step 2: update_kl is nan; the step is not recorded"):
        nmoe.train_rl(TINY, PROMPTS, [vowels], config=SETTINGS | {"run.name": "broken"})
    rows, spikes = (Path("runs/broken", name).read_text().splitlines() for name in ("metrics.jsonl", "spikes.jsonl"))
    assert (len(rows), json.loads(rows[0])["step"], DivergenceError.exit_code) == (1, 1, 1)
    (record,) = map(json.loads, spikes)
    assert (record["step"], record["spikes"], len(record["worst"])) == (2, ["update_kl"], 4)


def test_a_level_of_stop_saves_the_run_and_ends_it() -> None:
    config = SETTINGS | {"run.name": "stopped", "monitor.reward_stuck": {"level": "stop", "steps": 3}}
    with pytest.raises(
        RunStoppedError, match=r"step 3: all rewards of a group are alike .*\[monitor.reward_stuck\]; try: "
    ):
        nmoe.train_rl(TINY, PROMPTS, [constant], config=config)
    assert (Path("runs/stopped/checkpoints/latest")).resolve().name == "step_000003"
    assert RunStoppedError.exit_code == 1
    again = config | {"run.resume": True, "monitor.clip.level": "off"}
    assert len(nmoe.train_rl(TINY, PROMPTS, [constant], config=again).metrics) == SETTINGS["run.steps"], "told once"
    assert alerts(Path("runs/stopped")) == {"reward_stuck": 3}


def test_a_run_is_stopped_where_it_can_go_on_as_if_it_had_not_been() -> None:
    """Engines got the weights last at step 3: a run saved at step 5 would sample by other weights when it is resumed."""
    settings = {
        "engine": {"kind": "server", "publish_every": 3},
        "algorithm.correction": "tis",
        "run.steps": 9,
        "run.name": "between",
        "monitor.truncation.level": "stop",
    }
    with pytest.raises(RunStoppedError, match=r"^step 5: .*\[monitor.truncation\]"):
        nmoe.train_rl(TINY, PROMPTS, [vowels], config=SETTINGS | settings)
    assert (Path("runs/between/checkpoints/latest")).resolve().name == "step_000006"


def test_a_resumed_run_counts_on_where_it_was() -> None:
    config = SETTINGS | {"run.name": "whole", "run.steps": 12, "checkpoint.every_steps": 4}
    whole = nmoe.train_rl(TINY, PROMPTS, [constant], config=config)
    parts = config | {"run.name": "parts"}
    nmoe.train_rl(TINY, PROMPTS, [constant], config=parts | {"run.steps": 8})
    resumed = nmoe.train_rl(TINY, PROMPTS, [constant], config=parts | {"run.resume": True})
    assert alerts(whole.path) == alerts(resumed.path) == {"reward_stuck": 10}
