"""Quantised storage: FP8 by hand and against transformers' dequantisation; experts held in MXFP4, FP8 and NVFP4."""

import json
import math
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from family_cases import CASES, qwen3_moe
from family_cases import gpt_oss as cases
from family_cases.case import Case
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from nmoe.config.commands import COMMANDS, SelfplayConfig
from nmoe.config.loader import load_environment, load_run, load_run_with
from nmoe.config.problems import ConfigError
from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import UserError
from nmoe.eval.subject import open_subject
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import export_model, fingerprint, load_model, save_model
from nmoe.model.families.fp8 import by_block, by_row
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.moe import ExpertsByGroupedMM, ExpertsByLoop, ExpertWeights, MoE, RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.packed_experts import PackedExperts
from nmoe.model.peft_format import resume_adapter, save_adapter
from nmoe.model.policy import load_policy_on
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.plan.estimate import packed_expert_bytes, size_of
from nmoe.plan.rank_plan import plan
from nmoe.selfplay.loop import Roles
from nmoe.serve.chat import chat
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sampling

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FAMILIES = {case.config.model_type: case for case in reversed(CASES) if case.config.model_type != "gpt_oss"}


def compressed(strategy: str) -> dict[str, Any]:
    """As llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


def test_blocks_of_128_the_last_cut_off() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator) + 0.5
    ours = by_block(weight, scales)
    assert ours.dtype == torch.float32
    rows, columns = torch.arange(300) // 128, torch.arange(200) // 128
    assert torch.equal(ours, weight.float() * scales[rows][:, columns])
    assert torch.equal(by_row(weight, scales), ours)  # compressed-tensors' name for the same


def test_one_factor_for_a_row_and_for_the_whole() -> None:
    weight = torch.tensor([[1.0, -1.5], [448.0, 2.0**-9]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0], [0.375]], dtype=torch.bfloat16)
    assert by_row(weight, scales).tolist() == [[2.0, -3.0], [168.0, 0.375 * 2.0**-9]]
    assert by_row(weight, torch.tensor([0.5])).tolist() == [[0.5, -0.75], [224.0, 2.0**-10]]
    assert by_row(weight, torch.tensor(0.5)).tolist() == by_row(weight, torch.tensor([0.5])).tolist()
    for wrong in (torch.ones(2), torch.ones(3, 1), torch.ones(2, 2)):
        with pytest.raises(UserError, match=r"scales .* are not one for each 128 x 128 of \[2, 2\]"):
            by_row(weight, wrong)
    with pytest.raises(UserError, match=r"torch\.int8 \[2, 2\] beside scales is not a matrix in FP8"):
        by_row(weight.to(torch.int8), scales)


def quantise(directory: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Stores the matrices of attention and feed-forward in FP8; returns what all tensors then stand for."""
    tensors = load_file(directory / "model.safetensors")
    strategy = settings.get("config_groups", {}).get("group_0", {}).get("weights", {}).get("strategy", "block")
    plain = dict(tensors)
    for name, tensor in plain.items():
        # What releases keep in bf16: norms, embeddings, head and routers.
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name or ".gate." in name:
            continue
        rows, columns = tensor.shape
        spread = (128, 128) if strategy == "block" else (1, columns) if strategy == "channel" else (rows, columns)
        grid = [math.ceil(size / step) for size, step in zip(tensor.shape, spread, strict=True)]
        scales = (0.004 + 0.01 * torch.rand(grid, generator=torch.Generator().manual_seed(len(tensors)))).bfloat16()
        wide = scales.float().repeat_interleave(spread[0], 0).repeat_interleave(spread[1], 1)[:rows, :columns]
        tensors[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        plain[name] = tensors[name].float() * wide
        suffix = "_scale_inv" if settings["quant_method"] == "fp8" else "_scale"
        tensors[name + suffix] = scales.view(1) if strategy == "tensor" else scales
        if strategy == "tensor":  # releases of this kind mostly have a factor of the layer's inputs, too
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1, dtype=torch.bfloat16)
    assert len(tensors) > len(plain)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    return plain


@pytest.mark.parametrize(
    "settings",
    [BLOCKS, *map(compressed, ("channel", "tensor", "block"))],
    ids=["fp8", "by row", "by tensor", "by block"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_it_exactly(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    FAMILIES[family].make().save_pretrained(tmp_path)
    plain = quantise(tmp_path, settings)
    model = load_model(tmp_path)
    # Of the same decoder without quantisation, to the bit.
    (tmp_path / "plain").mkdir()
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(raw))
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    for name, tensor in load_model(tmp_path / "plain").state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    export_model(model, tmp_path / "export")
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    assert not any("scale" in name for name in load_file(tmp_path / "export" / "model.safetensors"))


@torch.no_grad()
def test_qwen3_moe_in_fp8_has_transformers_logits(tmp_path: Path) -> None:
    """At widths that fill blocks of 128, which transformers asks for."""
    case = qwen3_moe.CASES[0]
    widths = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 2}
    Case("wide", type(case.config)(**(case.config.to_dict() | widths)), case.model).make().save_pretrained(tmp_path)
    quantise(tmp_path, BLOCKS)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    model = load_model(tmp_path)
    ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(1))
    ours = model.logits(model(ids, torch.arange(60), PackedAttention([60], ids.device), RouterTrace()))
    torch.testing.assert_close(ours, reference(ids.unsqueeze(0)).logits[0], rtol=0, atol=1e-4)


def group(**weights: Any) -> dict[str, Any]:
    settings = compressed("channel")
    settings["config_groups"]["group_0"]["weights"] |= weights
    return settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method = 'gptq' is not supported, only 'fp8' or 'compressed-tensors'"),
        (BLOCKS | {"weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\] is not supported"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported, only 'e4m3'"),
        (compressed("channel") | {"format": "pack-quantized"}, "format = 'pack-quantized' is not supported"),
        (group(num_bits=4), "weights: num_bits = 4 is not supported, only 8"),
        (group(type="int"), "weights: type = 'int' is not supported"),
        (group(strategy="group"), "weights: strategy = 'group' is not supported"),
        (group(symmetric=False), "weights: symmetric = False is not supported"),
    ],
    ids=str,
)
def test_other_storage_is_refused_by_key_and_value(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    raw = FAMILIES["qwen3_moe"].config.to_dict() | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=rf"config\.json: qwen3_moe.*{message}"):
        load_model(tmp_path)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    case = cases.CASES[0]
    config = type(case.config)(**(case.config.to_dict() | {"intermediate_size": 64}))
    type(case)("mxfp4", config, case.model).make().save_pretrained(directory)
    cases.to_mxfp4(directory)
    return directory


@torch.no_grad()
def logits(model: Transformer, tokens: int) -> torch.Tensor:
    ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(1))[:tokens]
    return model.logits(model(ids, torch.arange(tokens), PackedAttention([tokens], ids.device), RouterTrace()))


FORMS = ("mxfp4", "fp8", "nvfp4")


def reference(released: Path, form: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """The dequantised model: of FP8 and NVFP4, in the profile whose numbers tests/model/test_expert_profile.py writes by hand."""
    return set_expert_profile(load_model(released, dtype), None if form == "mxfp4" else form)


@pytest.mark.parametrize("tokens", [1, 60])
@pytest.mark.parametrize("form", FORMS)
def test_logits_have_the_bits_of_the_dequantised_model(released: Path, form: str, tokens: int) -> None:
    packed, whole = load_model(released, expert_weights=form), reference(released, form)
    # Sums in another order: on fast numerics a dequantised model may run its experts at once.
    torch.testing.assert_close(logits(packed, tokens), logits(whole, tokens), rtol=0, atol=1e-5)
    exact = [logits(model.set_numerics("exact"), tokens) for model in (packed, whole)]
    assert torch.equal(*exact)
    low, wide = (logits(load(torch.bfloat16), tokens) for load in (
        lambda dtype: load_model(released, dtype, expert_weights=form), lambda dtype: reference(released, form, dtype)
    ))  # fmt: skip
    torch.testing.assert_close(low, wide, rtol=0, atol=0.1)


def adapted(model: Transformer, targets: tuple[str, ...] = ()) -> tuple[Transformer, Lora]:
    """A model with an adapter that changes what it computes."""
    lora = Lora(model, LoraSettings(2, 6.0, targets=targets), choose(model, targets), "base", "f").initialize(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model, lora


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_pass_through_packed_experts_as_through_the_dequantised(
    released: Path, form: str, numerics: str
) -> None:
    found = []
    for model in (load_model(released, expert_weights=form), reference(released, form)):
        targets = ("q_proj", "o_proj", *(("experts.gate_up_proj", "experts.down_proj") if form == "mxfp4" else ()))
        model, lora = adapted(model.set_numerics(numerics), targets)
        ids = torch.randint(64, (40,), generator=torch.Generator().manual_seed(2))
        attention = PackedAttention([15, 25], ids.device, exact=model.exact)
        positions = torch.cat([torch.arange(15), torch.arange(25)])
        out = model.logits(model(ids, positions, attention, RouterTrace()))
        gradients = torch.autograd.grad(out.log_softmax(-1)[:, 7].sum(), lora.parameters())
        assert all(bool(gradient.any()) for gradient in gradients)
        found.append([out.detach(), *gradients])
    for ours, theirs in zip(*found, strict=True):
        if numerics == "exact":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def expert_bytes(moe: MoE) -> int:
    state = moe.state_dict()
    return sum(x.nbytes for name, x in state.items() if name.startswith(("gate_up", "down")) and "bias" not in name)


# Of 6 experts, 32 x 128 and 64 x 32: 36,864 numbers; FP8 has 128 + 32 scales of four bytes for each expert, NVFP4 two factors.
@pytest.mark.parametrize(
    ("form", "expected"),
    [("mxfp4", 36_864 * 17 // 32), ("fp8", 36_864 + 6 * 160 * 4), ("nvfp4", 36_864 * 9 // 16 + 6 * 2 * 4)],
)
def test_bytes_of_packed_experts(released: Path, form: str, expected: int) -> None:
    packed, whole = (load_model(released, torch.bfloat16, expert_weights=name) for name in (form, "dequantized"))
    for ours, theirs in zip(packed.moe_layers(), whole.moe_layers(), strict=True):
        assert expert_bytes(theirs) == 2 * 36_864
        assert expert_bytes(ours) == expected
    assert not any("gate_up" in name and "bias" not in name for name, _ in packed.named_parameters())
    assert packed_expert_bytes(packed.config, form) == sum(map(expert_bytes, packed.moe_layers()))


class Dequantised:
    """What experts were dequantised, in order, and how many were in memory at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.experts: list[int] = []
        self.alive, self.most = weakref.WeakSet[Any](), 0
        one = PackedExperts.one

        def recorded(packed: PackedExperts, expert: int, dtype: torch.dtype) -> Tensor:
            out = one(packed, expert, dtype)
            self.experts.append(expert)
            self.alive.add(out.untyped_storage())
            self.most = max(self.most, len(self.alive))
            return out

        monkeypatch.setattr(PackedExperts, "one", recorded)


@pytest.mark.parametrize("form", FORMS)
def test_one_expert_at_a_time_is_dequantised_and_only_those_chosen(
    released: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    moe = load_model(released, expert_weights=form).requires_grad_(False).moe_layers()[0]
    seen, trace = Dequantised(monkeypatch), RouterTrace()
    x_TD = torch.randn(3, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = moe(x_TD, trace)
    chosen = trace.chosen_TK[0].unique().tolist()
    assert len(chosen) < 6
    assert seen.experts == [*chosen, *chosen]
    out.sum().backward()
    assert seen.experts[2 * len(chosen) :] == [*chosen, *chosen]
    # The last of a loop is in memory until the next takes its name.
    assert seen.most <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_accelerator_dequantises_all_experts_at_once_with_these_results(released: Path, dtype: torch.dtype) -> None:
    moe = load_model(released, dtype, expert_weights="mxfp4").moe_layers()[0]
    generator, counts_E = torch.Generator().manual_seed(0), torch.tensor([3, 0, 5, 1, 0, 2])
    weights = ExpertWeights(moe.gate_up_packed, moe.down_packed, moe.gate_up_bias, moe.down_bias, moe.limit)
    found = []
    for kind in (ExpertsByLoop, ExpertsByGroupedMM):
        x_RD = torch.randn(11, 32, generator=generator.manual_seed(0)).to(dtype).requires_grad_()
        out = kind(x_RD, counts_E, weights).run()
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), x_RD)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=float(other.abs().max()) * (1e-5 if dtype.itemsize == 4 else 2e-2)
        )


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
    roles = Roles.of(selfplay_config(released), words, None)
    assert roles.generator is roles.verifier is roles.meta_verifier
    assert all(isinstance(moe.down_packed, PackedExperts) for moe in roles.generator.moe_layers())
    with pytest.raises(
        ConfigError, match='expert_weights = "mxfp4": experts held in mxfp4 are frozen: train an adapter beside them'
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
    with pytest.raises(ConfigError, match="expert_weights=fp8: experts held in fp8 are frozen: train an adapter"):
        load_run(Path(name), COMMANDS[command], ["--model.expert_weights=fp8"])


def test_plans_count_packed_experts(released: Path) -> None:
    config = selfplay_config(released)
    model = load_model(released, expert_weights="mxfp4")
    others, packed = sum(one.nbytes for one in model.parameters()), sum(map(expert_bytes, model.moe_layers()))
    assert size_of(config).weights == others + packed
    held = plan(config, 2, 2).held
    assert held["weights to sample"] == others
    assert others / 2 <= held["weights"] - packed < others / 2 * 1.1


@pytest.mark.parametrize("form", FORMS)
def test_the_engine_samples_the_same_tokens(released: Path, form: str) -> None:
    sampled = []
    for model in (load_model(released, expert_weights=form), reference(released, form)):
        model.requires_grad_(False).set_numerics("exact")
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


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_is_loaded_beside_the_experts_that_it_was_trained_beside(
    released: Path, tmp_path: Path, form: str
) -> None:
    model, lora = adapted(load_model(released, expert_weights=form).set_numerics("exact"))
    lora.base, lora.fingerprint = str(released), fingerprint(released)
    save_adapter(lora, tmp_path)
    wanted = logits(model, 30)
    plain = adapted(load_model(released).set_numerics("exact"))[0]
    assert torch.equal(logits(plain, 30), wanted) == (form == "mxfp4")
    for loaded_in in ("dequantized", form):
        loaded = load_policy_on(tmp_path, "cpu", loaded_in, "float32").set_numerics("exact")
        assert torch.equal(logits(loaded, 30), wanted), loaded_in
    if form != "mxfp4":
        other = "nvfp4" if form == "fp8" else "fp8"
        with pytest.raises(
            UserError, match=f"trained beside experts in the profile {form}, and the base's are in {other}"
        ):
            load_policy_on(tmp_path, "cpu", other)
        with pytest.raises(
            UserError, match=f"trained beside experts in the profile {form}, and this run's model.expert_w"
        ):
            resume_adapter(Lora(plain, lora.settings, lora.sites, str(released), lora.fingerprint), tmp_path)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_a_checkpoint_trained_in_a_profile_is_held_in_it_and_in_no_other(tmp_path: Path, form: str) -> None:
    case = FAMILIES["qwen3_moe"]
    config = type(case.config)(**(case.config.to_dict() | {"moe_intermediate_size": 32}))
    Case("wide", config, case.model).make().save_pretrained(tmp_path / "plain")
    trained = set_expert_profile(load_model(tmp_path / "plain"), form)
    (tmp_path / "trained").mkdir()
    save_model(trained, tmp_path / "trained")
    held = load_model(tmp_path / "trained", expert_weights=form)
    assert held.config.expert_profile == form
    assert torch.equal(logits(held.set_numerics("exact"), 20), logits(trained.set_numerics("exact"), 20))
    other = "nvfp4" if form == "fp8" else "fp8"
    with pytest.raises(
        UserError, match=f"its experts were trained in {form}; hold them dequantized or in that, not in"
    ):
        load_model(tmp_path / "trained", expert_weights=other)


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
            r"blocks\.1\.ffn\.down hold NaN",
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
    with pytest.raises(UserError, match=r"not stored in MXFP4; load it with expert_weights = 'dequantized', 'fp8'"):
        load_model(tmp_path, expert_weights="mxfp4")
