"""Reinforcement learning of an adapter beside packed experts: sampler and learner hold the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import gpt_oss as cases

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.errors import UserError
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import load_model, packed_form
from nmoe.model.packed_experts import PackedExperts
from nmoe.model.policy import load_policy
from nmoe.rl import policy as rl_policy
from nmoe.rl.launch import train
from nmoe.runs.conversions import export_checkpoint
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

# Random weights are never right: the bonus alone gives a gradient.
FEW = (
    "--run.steps=2",
    "--batch.prompts_per_step=2",
    "--batch.group_size=2",
    "--algorithm.entropy_coef=1.0",
    "--algorithm.advantage=reinforce_pp",
)
RATE = ("--optimizer.learning_rate=1e-2", "--optimizer.eps=1e-4", "--model.numerics=exact")
LORA = "\n[lora]\nrank = 4\n"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, workshop: Path) -> Path:
    """A tiny gpt-oss as OpenAI releases them, with a tokenizer's vocabulary."""
    directory, case = tmp_path_factory.mktemp("released"), cases.CASES[0]
    tokenizer = Tokenizer.load(workshop / "tokenizer")
    changes = {"intermediate_size": 64, "vocab_size": tokenizer.vocab_size}
    type(case)("mxfp4", type(case.config)(**(case.config.to_dict() | changes)), case.model).make().save_pretrained(
        directory
    )
    cases.to_mxfp4(directory)
    tokenizer.save(directory)
    return directory


@pytest.mark.parametrize("form", ["mxfp4", "fp8", "nvfp4"])
def test_sampler_and_learner_agree_to_the_bit(
    workshop: Path, released: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners: list[Learner] = []

    class Recording(Learner):
        def __init__(self, *rest: Any, **named: Any) -> None:
            super().__init__(*rest, **named)
            learners.append(self)

    monkeypatch.setattr(rl_policy, "Learner", Recording)
    (tmp_path / "rl.toml").write_text(
        (workshop / "rl.toml").read_text().replace("reverse.toml", f"{workshop}/reverse.toml") + LORA
    )
    model = (f"--model.path={released}", f"--model.expert_weights={form}", f"--run.directory={tmp_path}")
    run = train(load_run(tmp_path / "rl.toml", RLConfig, [*model, *FEW, *RATE]))
    for row in read_metrics(run):
        assert row["mismatch_abs_max"] == 0
        assert row["grad_norm"] > 0
    (learner,) = learners
    assert packed_form(learner.model) == form
    held = sum(
        buffer.nbytes for one in learner.model.modules() if isinstance(one, PackedExperts) for buffer in one.buffers()
    )
    # Four layers of six experts, 32 x 128 and 64 x 32, against two bytes a number; scales of so short inputs weigh more.
    assert held / (4 * 36_864 * 2) == pytest.approx({"mxfp4": 17 / 64, "fp8": 0.552, "nvfp4": 0.2819}[form], abs=1e-3)
    # The adapter changed, and is loaded beside the same numbers.
    checkpoint = resolve_checkpoint(run)
    loaded, lora = load_policy(checkpoint)
    assert loaded.config.expert_profile == (None if form == "mxfp4" else form)
    assert any(bool(lora.part(site)[1].any()) for site in lora.sites)
    whole = load_model(released).moe_layers()[0].down
    if form == "mxfp4":
        export_checkpoint(checkpoint, tmp_path / "merged")
        assert torch.equal(load_model(tmp_path / "merged").moe_layers()[0].down, whole)
    else:
        with pytest.raises(UserError, match="gpt_oss stores the experts of a layer together"):
            export_checkpoint(checkpoint, tmp_path / "merged")
