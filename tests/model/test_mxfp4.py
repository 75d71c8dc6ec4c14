"""Experts kept in MXFP4: the bits of the dequantised model, in a fraction of its memory, and for sampling alone."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from family_cases import gpt_oss as cases
from safetensors.torch import load_file, save_file
from test_gpt_oss import quantise

from nmoe.config.commands import COMMANDS, SelfplayConfig
from nmoe.config.loader import load_environment, load_run, load_run_with
from nmoe.config.problems import ConfigError
from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import UserError
from nmoe.eval.subject import open_subject
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.moe import MoE, RouterTrace
from nmoe.model.mxfp4 import PackedExperts
from nmoe.model.packed import PackedAttention
from nmoe.model.peft_format import save_adapter
from nmoe.model.policy import load_policy_on
from nmoe.model.transformer import Transformer
from nmoe.selfplay.loop import Roles
from nmoe.serve.chat import chat
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sampling


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    case = cases.CASES[0]
    config = type(case.config)(**(case.config.to_dict() | {"intermediate_size": 64}))
    type(case)("mxfp4", config, case.model).make().save_pretrained(directory)
    quantise(directory)
    return directory


@torch.no_grad()
def logits(model: Transformer, tokens: int) -> torch.Tensor:
    ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(1))[:tokens]
    return model.logits(model(ids, torch.arange(tokens), PackedAttention([tokens], ids.device), RouterTrace()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 60])
def test_logits_have_the_bits_of_the_dequantised_model(released: Path, dtype: torch.dtype, tokens: int) -> None:
    packed = load_model(released, dtype, expert_weights="mxfp4")
    assert torch.equal(logits(packed, tokens), logits(load_model(released, dtype), tokens))


def expert_bytes(moe: MoE) -> int:
    state = moe.state_dict()
    return sum(x.nbytes for name, x in state.items() if name.startswith(("gate_up", "down")) and "bias" not in name)


def test_experts_take_17_bytes_for_32_numbers(released: Path) -> None:
    packed, whole = (load_model(released, torch.bfloat16, expert_weights=form) for form in ("mxfp4", "dequantized"))
    for ours, theirs in zip(packed.moe_layers(), whole.moe_layers(), strict=True):
        assert expert_bytes(ours) * 64 == expert_bytes(theirs) * 17
    assert not any("gate_up" in name and "bias" not in name for name, _ in packed.named_parameters())


def test_only_the_experts_that_were_chosen_are_dequantised(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = load_model(released, expert_weights="mxfp4").moe_layers()[0].down_packed
    whole = load_model(released).moe_layers()[0].down
    assert isinstance(packed, PackedExperts)
    assert whole is not None
    monkeypatch.setattr(torch, "empty", torch.zeros)
    out = packed(torch.tensor([[4, 1], [1, 4]]), torch.float32)
    assert [bool(one.any()) for one in out] == [False, True, False, False, True, False]
    assert torch.equal(out[[1, 4]], whole[[1, 4]])


def selfplay_config(released: Path, *overrides: str) -> SelfplayConfig:
    tables = {
        "run": {"name": "proofs", "steps": 4},
        "model": {"path": str(released), "expert_weights": "mxfp4", "tokenizer": "bytes"},
        "selfplay": {"problem_source": "deepseek_math_v2_inputs:inputs.json", "train": "train" in overrides},
        "sampling": {"max_new_tokens": 8},
        "batch": {"prompts_per_step": 1, "group_size": 2},
    }
    return load_run_with(None, SelfplayConfig, tables, "test", "proofs")


def test_self_play_without_training_samples_from_packed_experts(released: Path) -> None:
    words = cast(Tokenizer, SimpleNamespace(vocab_size=64))
    roles = Roles.of(selfplay_config(released), words)
    assert roles.generator is roles.verifier is roles.meta_verifier
    assert all(isinstance(moe.down_packed, PackedExperts) for moe in roles.generator.moe_layers())
    with pytest.raises(
        ConfigError, match='expert_weights = "mxfp4": experts in mxfp4 can be sampled and not trained; leave it out'
    ):
        selfplay_config(released, "train")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("pretrain", "tools_base"), ("sft", "sft"), ("dpo", "dpo"), ("reward", "reward"), ("verifier", "verifier")),
        *(("rl train", "sort_grpo"), ("rl train", "sort_distillation"), ("rl train", "sort_ppo")),
    ],
)
def test_a_training_run_refuses_packed_experts(command: str, name: str) -> None:
    with pytest.raises(ConfigError, match="expert_weights=mxfp4: experts in mxfp4 can be sampled and not trained"):
        load_run(Path(name), COMMANDS[command], ["--model.expert_weights=mxfp4"])


def test_the_engine_samples_the_same_tokens(released: Path) -> None:
    sampled = []
    for form in ("mxfp4", "dequantized"):
        model = load_model(released, expert_weights=form).requires_grad_(False)
        model.set_numerics("exact")
        engine = NativeEngine(model, 2)
        request = Request((5, 6, 7), samples=2, sampling=Sampling(12, seed=3), request_id="0")
        sampled.append(engine.run(engine.generate(request)))
    for ours, theirs in zip(*sampled, strict=True):
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


@torch.no_grad()
def test_cached_decode_is_the_full_forward_pass(released: Path) -> None:
    model = load_model(released, expert_weights="mxfp4").requires_grad_(False).set_numerics("exact")
    engine = NativeEngine(model, 2)
    sampling = Sampling(20, temperature=1.0, seed=5)
    (sample,) = engine.run(engine.generate(Request((5, 6, 7, 8), samples=1, sampling=sampling, request_id="0")))
    ids = torch.tensor([5, 6, 7, 8, *sample.token_ids])
    attention = PackedAttention([len(ids)], ids.device, exact=True)
    full = model.logits(model(ids, torch.arange(len(ids)), attention, RouterTrace()))
    expected = full.log_softmax(-1)[3:-1].gather(1, ids[4:, None])[:, 0]
    assert len(sample.token_ids) == 20
    # Logits have the same bits; torch's log_softmax and the engine's differ by roundings of logits of up to 16: 2^-20 each.
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=2e-6)


def test_a_device_that_is_not_there_is_named_before_anything_is_loaded(released: Path) -> None:
    packed = load_policy_on(released, "cpu", "mxfp4")
    assert all(isinstance(moe.down_packed, PackedExperts) for moe in packed.moe_layers())
    with pytest.raises(UserError, match="--device"):
        load_policy_on(released / "nowhere", "cuda:99", "mxfp4")


def test_chat_and_evaluation_ask_for_them(tmp_path: Path) -> None:
    cases.CASES[0].make().save_pretrained(tmp_path)
    Tokenizer.train(["a"], 300).save(tmp_path)
    with pytest.raises(UserError, match="not stored in MXFP4"):
        chat(tmp_path, 0.0, 8, 0, device="cpu", expert_weights="mxfp4")
    environment = load_environment(Path("sort"))
    subject = open_subject(tmp_path, environment, 1, on_held_out=False, device="cpu", expert_weights="mxfp4")
    with pytest.raises(UserError, match="not stored in MXFP4"), subject:
        pass


def test_an_adapter_over_packed_experts_is_refused(released: Path, tmp_path: Path) -> None:
    model = load_model(released)
    lora = Lora(model, LoraSettings(2, 6.0), choose(model, ()), str(released), "f").initialize(0)
    save_adapter(lora, tmp_path)
    with pytest.raises(UserError, match=r"an adapter's base has its experts dequantised; load it with"):
        load_policy_on(tmp_path, "cpu", "mxfp4")


def test_training_and_export_are_refused(released: Path, tmp_path: Path) -> None:
    packed = load_model(released, expert_weights="mxfp4")
    with pytest.raises(UserError, match=r"cannot be exported; load it with expert_weights = 'dequantized'"):
        export_model(packed, tmp_path / "out")
    with pytest.raises(UserError, match="cannot be trained"):
        Learner(packed, OptimizerSection(), 1, tokens_per_microbatch=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t["model.layers.1.mlp.experts.down_proj_scales"].fill_(255),
            r"blocks\.1\.ffn\.down_packed hold NaN",
        ),
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"), "down_proj_scales is missing"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.down_proj_scales": torch.zeros(6, 32, 2)}),
            "down_proj_scales is stored as F32, not as bytes",
        ),
    ],
)
def test_damaged_blocks_are_refused(released: Path, tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(released, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_model(tmp_path, expert_weights="mxfp4")


def test_a_model_without_such_experts_is_refused(tmp_path: Path) -> None:
    cases.CASES[0].make().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"not stored in MXFP4; load it with expert_weights = 'dequantized'"):
        load_model(tmp_path, expert_weights="mxfp4")
