"""`nmoe model upcycle`: what a mixture of copies computes, what noise and seed change, and what is refused."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nmoe import cli
from nmoe.errors import StorageError, UserError
from nmoe.model.checkpoint import export_model, load_model, save_model
from nmoe.model.config import ModelConfig
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.model.upcycle import Upcycling
from nmoe.runs import upcycle as upcycle_module
from nmoe.runs.upcycle import upcycle
from tests.chat_templates import qwen
from tests.tiny_models import FAMILIES, MOE


def dense_in(directory: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    """A small dense model with a tokenizer."""
    tokenizer = qwen(directory)
    model = Transformer(ModelConfig(**FAMILIES[family] | {"vocab_size": tokenizer.vocab_size}))
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    export_model(model.to(dtype), directory)
    return directory


def logits(directory: Path, dtype: torch.dtype) -> tuple[Tensor, Transformer]:
    model = load_model(directory, dtype)
    ids = torch.randint(40, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states_TD = model(ids, torch.arange(50), PackedAttention([50], torch.device("cpu")), RouterTrace())
    return states_TD @ model.head_weight.T, model


@pytest.mark.parametrize(
    ("family", "becomes", "experts", "top_k", "shared"),
    [
        ("llama", "mixtral", 4, 2, False),
        ("llama", "mixtral", 8, 2, False),
        ("mistral", "mixtral", 8, 4, False),
        ("qwen3", "qwen3_moe", 4, 1, False),
        ("qwen3", "qwen3_moe", 8, 3, False),
        ("llama", "nmoe", 4, 2, True),
    ],
)
def test_the_mixture_computes_what_the_dense_model_does(
    family: str, becomes: str, experts: int, top_k: int, shared: bool, tmp_path: Path
) -> None:
    """To the bit in bf16. In fp32 the weights of the chosen experts sum to 1 up to 2^-23 alone, of which an output shows some."""
    dense, out = dense_in(tmp_path / "dense", family), tmp_path / "out"
    said = upcycle(dense, Upcycling(experts, top_k, shared_expert=shared), out)
    assert json.loads((out / "config.json").read_text())["model_type"] == becomes
    expected, small = logits(dense, torch.bfloat16)
    found, large = logits(out, torch.bfloat16)
    assert torch.equal(found, expected)
    (config, before) = large.config, small.config
    assert (config.experts, config.experts_per_token, config.shared_experts) == (experts, top_k, int(shared))
    # Of each layer there are so many copies of the block, and a router.
    block = 3 * before.hidden_size * before.intermediate_size
    added = (experts - 1 + shared) * block + experts * before.hidden_size
    parameters = sum(weight.numel() for weight in small.parameters()) + before.layers * added
    assert f"{parameters:,} weights as {becomes}, {top_k} of {experts} experts" in said
    wide = logits(out, torch.float32)[0]
    torch.testing.assert_close(wide, logits(dense, torch.float32)[0], rtol=1e-5, atol=1e-4)


def test_weights_that_do_not_sum_to_one_would_be_seen(tmp_path: Path) -> None:
    """What makes the logits equal is `renormalize`: without it the same weights compute something else."""
    dense, out = dense_in(tmp_path / "dense", "qwen3"), tmp_path / "out"
    upcycle(dense, Upcycling(4, 2), out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    assert (logits(out, torch.bfloat16)[0] - logits(dense, torch.bfloat16)[0]).abs().max() > 1


def test_transformers_reads_the_mixture(tmp_path: Path) -> None:
    dense, out = dense_in(tmp_path / "dense", dtype=torch.float32), tmp_path / "out"
    upcycle(dense, Upcycling(4, 2), out)
    theirs = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    ids = torch.randint(40, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = theirs(ids[None]).logits[0]
    torch.testing.assert_close(found, logits(dense, torch.float32)[0], rtol=1e-4, atol=1e-4)


def test_noise_and_seed(tmp_path: Path) -> None:
    """Copies differ from the weight, and from one another, by the noise that was asked for; a seed gives the same files again."""
    dense = dense_in(tmp_path / "dense", dtype=torch.float32)
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        upcycle(dense, Upcycling(4, 2, noise=0.05, seed=seed), tmp_path / name)
    models = {name: load_model(tmp_path / name).state_dict() for name in ("first", "again", "other")}
    for key, weight in models["first"].items():
        assert torch.equal(models["again"][key], weight)
        drawn = key.endswith(("router.weight", "gate_up", "down"))
        assert torch.equal(models["other"][key], weight) != drawn, key
    before = load_model(dense).state_dict()
    for layer in range(2):
        copied_EDF = models["first"][f"blocks.{layer}.ffn.gate_up"]
        weight_DF = before[f"blocks.{layer}.ffn.gate_up_proj.weight"].T
        noise_EDF = (copied_EDF - weight_DF) / weight_DF.std()
        assert noise_EDF.std().item() == pytest.approx(0.05, rel=0.03)
        assert (noise_EDF[0] - noise_EDF[1]).std().item() == pytest.approx(0.05 * 2**0.5, rel=0.05)
    routers = [models["first"][f"blocks.{layer}.ffn.router.weight"] for layer in range(2)]
    assert torch.cat(routers).std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(*routers)


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.model.upcycle._SHARD_BYTES", 40_000)
    dense, out = dense_in(tmp_path / "dense"), tmp_path / "out"
    upcycle(dense, Upcycling(8, 2), out)
    files = list(out.glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 60_000 for file in files)
    assert torch.equal(logits(out, torch.bfloat16)[0], logits(dense, torch.bfloat16)[0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--experts", "1", "--top-k", "1"], "--experts 1: a mixture has at least 2 experts"),
        (["--experts", "0"], "--experts 0: a mixture has at least 2 experts"),
        (["--experts", "4", "--top-k", "5"], "--top-k 5: must be between 1 and --experts 4"),
        (["--top-k", "0"], "--top-k 0: must be between 1 and --experts 4"),
        (["--noise", "nan"], "--noise nan: must be between 0 and 1"),
        (["--noise", "-0.1"], "--noise -0.1: must be between 0 and 1"),
    ],
)
def test_numbers_that_make_no_mixture(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nmoe", "model", "upcycle", "dense", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert list(tmp_path.iterdir()) == []


def test_models_that_are_refused(tmp_path: Path) -> None:
    settings, out = Upcycling(4, 2), tmp_path / "out"
    qwen2 = dense_in(tmp_path / "qwen2", "qwen2")
    with pytest.raises(
        UserError, match=r"qwen2: qwen2 cannot be upcycled, but llama and mistral.* lacks qkv_bias = True"
    ):
        upcycle(qwen2, settings, out)
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    save_model(Transformer(ModelConfig(**MOE)).initialize(0), mixture)
    with pytest.raises(UserError, match=r"mixture: a mixture of 6 experts already"):
        upcycle(mixture, settings, out)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter: an adapter; make a whole model of it first: nmoe export"):
        upcycle(tmp_path / "adapter", settings, out)
    assert {path.name for path in tmp_path.iterdir()} == {"qwen2", "mixture", "adapter"}


def test_what_is_there_stays_and_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, settings, out = dense_in(tmp_path / "dense"), Upcycling(4, 2), tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match=r"out: exists; name another directory with --out"):
        upcycle(dense, settings, out)
    out.rmdir()
    monkeypatch.setattr(upcycle_module, "bytes_free", lambda path: 1000)
    with pytest.raises(UserError, match=r"out: takes [0-9,]+ bytes, and 1,000 are free there") as refused:
        upcycle(dense, settings, out)
    assert refused.value.exit_code == 2
    monkeypatch.undo()

    def full(*_: Any) -> None:
        (tmp_path / ".out.partial" / "model.safetensors").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upcycle_module, "write_mixture", full)
    with pytest.raises(StorageError, match="No space left"):
        upcycle(dense, settings, out)
    monkeypatch.undo()
    weights = dense / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors: torn"):
        upcycle(dense, settings, out)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
