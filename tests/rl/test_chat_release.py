"""A run on a chat release whose turns end in the second id of generation_config.json, from its first sample to its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from chat_templates import gemma

import nmoe
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.runs.conversions import export_checkpoint
from nmoe.text.tokenizer import Tokenizer

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
