"""Reinforcement learning of an adapter: it learns, its base is the reference, and what it leaves can be used."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from nmoe.config.commands import PretrainConfig
from nmoe.config.loader import load_run
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.evaluate import evaluate
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.passes import batch_logprobs
from nmoe.model.checkpoint import load_model, save_model
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.policy import load_policy
from nmoe.recipes import setup
from nmoe.recipes.pretrain import pretrain
from nmoe.rl import policy as rl_policy
from nmoe.runs.conversions import export_checkpoint
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

Reinforce = Callable[..., Path]
SMALL = ("--run.steps=3", "--batch.prompts_per_step=6", "--batch.group_size=4")
LORA = "[lora]\nrank = 8\nalpha = 16\n"
RATE = ("--optimizer.learning_rate=1e-2", "--optimizer.eps=1e-4")


def correctness(run: Path, environment: Path) -> float:
    """The share of six answers to each held-out problem, sampled at temperature 1, that are right."""
    directory = resolve_checkpoint(run)
    tokenizer, model = Tokenizer.load(directory), load_policy(directory)[0]
    held_out = Environment.from_toml(environment, tokenizer).held_out()
    engine = NativeEngine(model, 256)
    mean, *_ = evaluate(engine, held_out, 64, problems=120, samples=6, temperature=1.0, max_new_tokens=20, seed=0)
    return mean.value


def test_an_adapter_learns_what_full_training_does(base: Path, workshop: Path, reinforce: Reinforce) -> None:
    run = reinforce(*RATE, text=LORA)
    before, after = (correctness(of, workshop / "reverse.toml") for of in (base, run))
    assert 0.1 < before < 0.5
    assert after >= before + 0.3
    for row in read_metrics(run):
        assert 0 <= row["mismatch_abs_mean"] <= 1e-6
        assert row["mismatch_abs_max"] <= 1e-4
        assert abs(row["ppo_kl"]) <= 1e-6
    files = {path.name for path in resolve_checkpoint(run).iterdir()}
    assert "model.safetensors" not in files
    assert {"adapter_model.safetensors", "base.json"} <= files


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that models are loaded from."""
    seen: list[Path] = []

    def record(directory: Path, *rest: Any) -> Any:
        seen.append(directory)
        return load_model(directory, *rest)

    monkeypatch.setattr(setup, "load_model", record)
    return seen


def test_the_reference_is_the_base_and_no_second_model(
    base: Path, reinforce: Reinforce, loads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[tuple[Batch, Tensor]] = []

    class Recording(Learner):
        def forward_backward(self, batch: Batch, *rest: Any) -> Any:
            assert batch.reference_logprobs_T is not None
            references.append((batch, batch.reference_logprobs_T[batch.scored_T]))
            return super().forward_backward(batch, *rest)

    monkeypatch.setattr(rl_policy, "Learner", Recording)
    rows = read_metrics(reinforce(*SMALL, *RATE, "--algorithm.kl_coef=0.1", text=LORA))
    first, *later = [row["reference_kl"] for row in rows]
    assert first == 0
    assert min(later) > 1e-5
    assert loads == [resolve_checkpoint(base)]
    alone = load_model(resolve_checkpoint(base))
    torch.set_num_threads(1)
    assert len(references) == 3
    for batch, reference_N in references:
        assert torch.equal(reference_N, batch_logprobs(alone, batch.without_routes(), 16384, 1.0))


def test_an_adapter_is_where_another_run_starts(reinforce: Reinforce, workshop: Path, tmp_path: Path) -> None:
    first = reinforce(*SMALL, *RATE, "--run.name=first", text=LORA)
    second = reinforce(
        *SMALL, "--run.steps=1", "--run.name=second", "--optimizer.learning_rate=1e-12", f"--lora.path={first}"
    )
    (_, one), (_, two) = (load_policy(resolve_checkpoint(run)) for run in (first, second))
    assert one is not None
    assert two is not None
    assert (two.settings.rank, two.settings.alpha) == (8, 16)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(b, a, rtol=0, atol=1e-9)
    with pytest.raises(UserError, match=r"an adapter; name its base in model\.path and the adapter in lora\.path"):
        reinforce("--run.name=third", f"--model.path={first}", text="")
    assert not (tmp_path / "third").exists()


def test_the_reference_of_a_run_from_an_adapter_is_that_adapter(reinforce: Reinforce) -> None:
    first = reinforce(*SMALL, *RATE, "--run.name=first", text=LORA)
    more = (
        *SMALL,
        *RATE,
        f"--lora.path={first}",
        "--algorithm.kl_coef=0.1",
        "--checkpoint.every_steps=1",
        "--checkpoint.keep=3",
    )
    whole = reinforce(*more, "--run.name=whole")
    start, *later = [row["reference_kl"] for row in read_metrics(whole)]
    assert start == 0
    assert min(later) > 1e-5
    # A resumed run measures from the same start, and not from what it had become.
    shutil.rmtree(whole / "checkpoints" / "step_000003")
    shutil.rmtree(whole / "checkpoints" / "step_000002")
    again = read_metrics(reinforce(*more, "--run.name=whole", "--run.resume=true"))
    assert [row["reference_kl"] for row in again] == [start, *later]


def test_pretraining_goes_on_in_an_adapter(base: Path, workshop: Path, tmp_path: Path) -> None:
    text = (workshop / "base.toml").read_text()
    shape = text[text.index("[model.shape]") : text.index("[data]")]
    (tmp_path / "more.toml").write_text(text.replace(shape, f'path = "{base}"\n\n{LORA}\n'))
    overrides: Sequence[str] = (
        *("--run.steps=3", "--optimizer.warmup_steps=2", "--eval.0.every_steps=3"),
        f"--run.directory={tmp_path}",
    )
    run = pretrain(load_run(tmp_path / "more.toml", PretrainConfig, overrides))
    assert (resolve_checkpoint(run) / "adapter_model.safetensors").exists()
    assert "adapter: " in (run / "log.txt").read_text()
    assert read_metrics(run)[-1]["held_out_loss"] > 0


def test_exports_of_an_adapter(base: Path, reinforce: Reinforce, tmp_path: Path) -> None:
    # Without the balancing bias the base is a Qwen3-MoE.
    plain = tmp_path / "plain"
    shutil.copytree(resolve_checkpoint(base), plain)
    model = load_model(plain)
    for moe in model.moe_layers():
        moe.router.bias.zero_()
    save_model(model, plain)
    run = reinforce(*SMALL, *RATE, f"--model.path={plain}", text=LORA + 'targets = ["q_proj", "experts.down_proj"]\n')
    export_checkpoint(run, tmp_path / "adapter", format="peft")
    export_checkpoint(run, tmp_path / "merged")
    assert "model.safetensors" not in {path.name for path in (tmp_path / "adapter").iterdir()}

    ids = torch.arange(100, 130).unsqueeze(0)
    policy = load_policy(resolve_checkpoint(run))[0]
    attend = PackedAttention([30], ids.device)
    with torch.no_grad():
        ours = policy.logits(policy(ids[0], torch.arange(30), attend, RouterTrace()))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits[0]
        torch.testing.assert_close(merged, ours, rtol=0, atol=1e-4)
        export_checkpoint(plain, tmp_path / "base")
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
        torch.testing.assert_close(peft(ids).logits[0], ours, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="a whole model; format peft is for adapters"):
        export_checkpoint(plain, tmp_path / "no", format="peft")

    model.norm.weight.data[0] += 1
    save_model(model, plain)
    with pytest.raises(
        UserError, match=r"base\.json: trained beside .* now holds another configuration or other weights"
    ):
        export_checkpoint(run, tmp_path / "no")
    shutil.rmtree(plain)
    with pytest.raises(UserError, match=r"plain, is neither a directory with a config\.json"):
        export_checkpoint(run, tmp_path / "no")
    assert not (tmp_path / "no").exists()
