"""Pretraining: what a batch of documents scores, what the base learned, and what a resumption insists on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nmoe.config.run import PretrainConfig, load_run
from nmoe.data.documents import read_documents
from nmoe.errors import UserError
from nmoe.learner.forward import batch_logprobs
from nmoe.model.checkpoint import load_model
from nmoe.recipes.pretrain import document_batch, pretrain
from nmoe.runs import watch
from nmoe.runs.directory import recorded_threads
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

SHORT = ("--run.steps=1", "--optimizer.warmup_steps=0", "--eval.every_steps=0", "--data.tokens_per_step=64")


def test_every_token_after_the_first_is_predicted() -> None:
    batch = document_batch([np.array([5, 6, 7]), np.array([8, 9])])
    assert batch.lengths == (2, 1)
    assert batch.inputs_T.tolist() == [5, 6, 8]
    assert batch.targets_T.tolist() == [6, 7, 9]
    assert batch.scored_T.tolist() == [True, True, True]
    torch.testing.assert_close(batch.weights_T, torch.full((3,), 1 / 3))


def test_the_held_out_loss_is_that_of_the_last_documents(workshop: Path, base: Path) -> None:
    rows = read_metrics(base)
    assert [row["step"] for row in rows if "held_out_loss" in row] == [200, 400, 600]
    directory = resolve_checkpoint(base)
    held_out = read_documents(str(workshop / "corpus.jsonl"), Tokenizer.load(directory), 64)[-50:]
    logprobs_N = batch_logprobs(load_model(directory), document_batch(held_out), 4096, 1.0)
    assert len(logprobs_N) == sum(len(document) - 1 for document in held_out)
    assert rows[-1]["held_out_loss"] == pytest.approx(float(-logprobs_N.mean()), abs=1e-6)
    assert rows[-1]["held_out_loss"] < rows[0]["loss"] / 10


def test_a_run_goes_on_with_the_threads_it_began_with(workshop: Path, tmp_path: Path) -> None:
    def run(*overrides: str) -> Path:
        overrides = (*SHORT, f"--run.directory={tmp_path}", *overrides)
        return pretrain(load_run(workshop / "base.toml", PretrainConfig, overrides))

    path = run("--run.threads=2")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    run("--run.threads=1", "--run.steps=2", "--run.resume=true")
    assert torch.get_num_threads() == recorded_threads(path) == 2
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    torch.set_num_threads(1)


def test_a_run_does_not_go_on_with_other_documents(workshop: Path, tmp_path: Path) -> None:
    lines = (workshop / "corpus.jsonl").read_text().splitlines()
    documents = tmp_path / "documents.jsonl"
    documents.write_text("\n".join(lines[:100]))
    overrides = [*SHORT, f"--run.directory={tmp_path}", f"--data.documents={documents}"]
    pretrain(load_run(workshop / "base.toml", PretrainConfig, overrides))
    first = json.loads(lines[0])["token_ids"]
    documents.write_text("\n".join([json.dumps({"token_ids": [*first[:-1], first[0]]}), *lines[1:100]]))
    with pytest.raises(UserError, match=r"documents\.jsonl: not the documents that this run began with"):
        pretrain(load_run(workshop / "base.toml", PretrainConfig, [*overrides, "--run.steps=2", "--run.resume=true"]))


def test_collapsing_experts_are_told_of_once(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "COLLAPSE_VIOLATION", 0.0)  # any load is too uneven, and none recovers
    monkeypatch.setattr(watch, "RECOVERED_VIOLATION", 0.0)
    monkeypatch.setattr(watch, "COLLAPSE_STEPS", 2)
    overrides = [f"--run.directory={tmp_path}", *SHORT, "--run.steps=4"]
    run = pretrain(load_run(workshop / "base.toml", PretrainConfig, overrides))
    (alert,) = read_lines(run / "alerts.jsonl")
    assert alert["step"] == 2
    assert "experts collapse in layer 0" in alert["message"]
    assert "raise router_aux_loss_coef" in alert["message"]
    assert capfd.readouterr().out.count("experts collapse") == 1
    shares = read_metrics(run)[-1]["expert_load/1"]
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(1, abs=1e-4)
