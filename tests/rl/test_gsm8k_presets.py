"""Runs on chat releases: the presets on GSM8K, and turns that end in the second id of generation_config.json."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import gemma
from real_benchmarks import DATA, REAL, WHOLE
from released_tokenizers import ours, theirs

import nmoe
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_environment, load_run_with
from nmoe.config.packaged import find_configuration, packaged_environment
from nmoe.envs.environment import Environment
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.runs.conversions import export_checkpoint
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import single_turn

PRESETS = ["qwen3_0.6b", "smollm2_135m"]


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The questions of each split, kept as `nmoe data download openai/gsm8k` keeps them."""
    if not DATA.exists():
        pytest.skip("shared/eval_data is not beside the repository")
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path))
    kept = {name: REAL[name].keep(tmp_path, None if WHOLE else 270) for name in ("gsm8k", "gsm8k_test")}
    return {name: [one["question"] for one in some] for name, some in kept.items()}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_evaluated_on_training_problems_that_it_is_not_trained_on(
    name: str, records: dict[str, list[str]], tmp_path: Path
) -> None:
    tokenizer = ours("qwen3")
    tables = {"run": {"directory": str(tmp_path)}, "model": {"path": str(tmp_path)}}
    config = load_run_with(find_configuration(name), RLConfig, tables, "test", "run")
    (probe,) = config.eval
    assert probe.environment is not None
    training, held_out, test = (
        Environment.from_settings(settings, tokenizer)
        for settings in (config.environment, probe.environment, load_environment(packaged_environment("gsm8k_test")))
    )
    asked = [
        {environment.pool.order.at(place).question for place in range(environment.pool.size or 0)}
        for environment in (training, held_out, test)
    ]
    questions = {name: [question.strip() for question in some] for name, some in records.items()}
    assert asked == [set(questions["gsm8k"][200:]), set(questions["gsm8k"][:200]), set(questions["gsm8k_test"])]
    assert len(asked[1]) == probe.problems == 200
    assert not asked[0] & asked[1]
    assert not (asked[0] | asked[1]) & asked[2]
    assert probe.environment.env_id != config.environment.env_id
    # What is asked is what transformers asks, and fits.
    problem = training.pool.order.at(0)
    system = training.settings.system
    dicts = [{"role": "system", "content": system}, {"role": "user", "content": problem.question}]
    prompt = training.prompts.ids(problem)
    assert prompt == theirs("qwen3").apply_chat_template(dicts, add_generation_prompt=True, return_dict=False)
    assert len(prompt) < (config.environment.budget.prompt_tokens or 0)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("48 / 2 = 24, 48 + 24 = 72\n#### {}", 1.1),
        ("So the answer is \\boxed{{{}}}.", 1.1),
        ("Natalia sold {} clips altogether.", 1.1),
        ("{}, or perhaps 71", 0.1),
        ("#### 1{}", 0.1),
    ],
)
def test_a_right_number_at_the_end_is_right(said: str, score: float, records: dict[str, list[str]]) -> None:
    tokenizer = ours("qwen3")
    demo = Environment.from_toml(packaged_environment("gsm8k"), tokenizer)
    natalia = next(
        one
        for one in (demo.pool.order.at(place) for place in range(demo.pool.size or 0))
        if one.question.startswith("Natalia sold clips")
    )
    assert natalia.gold == "72"
    ids = [*tokenizer.encode(said.format(natalia.gold)), tokenizer.end_ids[0]]
    grade = asyncio.run(demo.grader.grade(natalia, single_turn(ids), 256))
    assert grade.score == pytest.approx(score)


SHAPE = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64}


def test_samples_are_trained_up_to_either_end_and_the_export_keeps_both(
    tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = gemma(tmp_path / "release")
    settings = json.loads((tmp_path / "release/generation_config.json").read_text())
    model = Transformer(ModelConfig(**SHAPE, context_tokens=256, vocab_size=tokenizer.vocab_size)).initialize(0)
    with torch.no_grad():
        model.embedding.weight.mul_(0.1)  # nearly uniform: some samples say an end soon
    model.generation = settings
    save_model(model, tmp_path / "release")

    said: list[list[int]] = []

    def lengths(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        said.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    run = nmoe.train_rl(
        str(tmp_path / "release"),
        env=[{"prompt": "Sing."}, {"prompt": "Hum."}],
        rewards=[lengths],
        config={
            "run": {"steps": 1, "name": "chat", "directory": str(tmp_path)},
            "batch": {"prompts_per_step": 2, "group_size": 16},
            "sampling.max_new_tokens": 150,
        },
    )
    ends = set(settings["eos_token_id"])
    last = [ids[-1] for ids in said if ids[-1] in ends]
    assert set(last) == ends  # both ends ended samples
    assert not any(ends & set(ids[:-1]) for ids in said)
    row = run.metrics[-1]
    assert row["truncated"] == 1 - len(last) / 32
    # The end that was sampled belongs to the sample.
    assert row["response_length_mean"] == sum(map(len, said)) / 32
    note = "release/generation_config.json has temperature 0.6, top_p 0.95, top_k 64; here it is temperature 1, top_p 1, top_k 0"
    assert note in capfd.readouterr().out

    export_checkpoint(tmp_path / "chat", tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == settings
    assert Tokenizer.load(tmp_path / "out").end_ids == tokenizer.end_ids
