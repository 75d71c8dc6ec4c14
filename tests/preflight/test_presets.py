"""The presets for released models: the guidelines' numbers, and preflight's arithmetic by published shapes, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_preparation, load_run_with
from nmoe.config.packaged import find_configuration
from nmoe.plan.estimate import estimate, size_of
from nmoe.preflight.learning_rate import learning_rate
from nmoe.rl.episodes import with_steps_of_episodes

# config.json as published on the hub, as far as shapes go.
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "hidden_act": "silu",
}
SHAPES = {
    "gpt_oss_20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt_oss_120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "qwen3_30b_a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "qwen3_0.6b": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
# SmolLM2-135M-Instruct.
SHAPES["smollm2_135m"] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SHAPES["numina_grpo"] = SHAPES["gpt_oss_20b"]
# 200 of 7,473 are held out.
GSM8K_PROBLEMS, POOL_PROBLEMS = 7273, 400
ON_GSM8K = ("qwen3_0.6b", "smollm2_135m")


def preset(name: str, tmp_path: Path) -> RLConfig:
    """The preset on a checkpoint that is only its config.json, as long as its pool makes it."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    tables = {"run": {"directory": str(tmp_path / "runs")}, "model": {"path": str(tmp_path)}}
    config = load_run_with(find_configuration(name), RLConfig, tables, "test", "run")
    return with_steps_of_episodes(config, GSM8K_PROBLEMS if name in ON_GSM8K else POOL_PROBLEMS)


def attention_adapter(shape: dict[str, Any], rank: int) -> int:
    """A and B of q, k, v and o in every layer: rank x (in + out)."""
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    return shape["num_hidden_layers"] * rank * (2 * (hidden + queries) + 2 * (hidden + keys))


@pytest.mark.parametrize(
    ("name", "parameters", "rank", "steps", "updates", "share", "status"),
    [
        # 20.9 and 116.8 billion: OpenAI's model card, arXiv:2508.10925, table 1. 30.5 and 0.6 billion: arXiv:2505.09388.
        ("gpt_oss_20b", 20.9e9, 32, 500, 8, "80%", "ok"),
        ("gpt_oss_120b", 116.8e9, 64, 2500, 8, "27%", "warn"),
        ("numina_grpo", 20.9e9, 32, 25, 8, "100%", "ok"),
        ("qwen3_30b_a3b", 30.5e9, 32, 500, 8, "80%", "ok"),
        ("qwen3_0.6b", 0.596e9, None, 113, 1, "100%", "ok"),
        ("smollm2_135m", 0.1345e9, None, 113, 1, "100%", "ok"),
    ],
)
def test_the_arithmetic_of_a_preset(
    tmp_path: Path,
    name: str,
    parameters: float,
    rank: int | None,
    steps: int,
    updates: int,
    share: str,
    status: str,
) -> None:
    config = preset(name, tmp_path)
    assert (config.run.name, config.run.steps, config.batch.updates) == (name, steps, updates)
    check = learning_rate(config)
    assert (check.status, check.text.split()[0]) == (status, share)
    size = size_of(config)
    assert size.parameters == pytest.approx(parameters, rel=0.005)
    assert size.trained == (size.parameters if rank is None else attention_adapter(SHAPES[name], rank))
    assert size.dtype == torch.bfloat16
    samples = config.batch.prompts_per_step * config.batch.group_size
    assert f"= {samples:,} samples" in batch_arithmetic(config)[0]
    longest = config.environment.budget.prompt_tokens or 0
    assert longest + config.sampling.max_new_tokens <= config.batch.tokens_per_microbatch
    assert longest + config.sampling.max_new_tokens <= size.shape.context_tokens


def test_the_guidelines_numbers(tmp_path: Path) -> None:
    """Section 6 of the training guidelines: the columns of the 20B and the 120B model."""
    for name, rate, kl, rank, prompts, tokens, warmup, optimizer_steps in (
        ("gpt_oss_20b", 5e-7, 0.001, 32, 16, 4096, 0.05, 400 * 8 // 16 * 20),
        ("gpt_oss_120b", 1e-6, 0.0, 64, 8, 3072, 0.03, 400 * 8 // 8 * 50),
        ("numina_grpo", 5e-7, 0.001, 32, 16, 4096, 0.05, 400 * 8 // 16),
    ):
        config = preset(name, tmp_path)
        assert config.lora is not None
        found = (
            config.optimizer.learning_rate,
            config.algorithm.kl_coef,
            config.lora.rank,
            config.batch.prompts_per_step,
            config.sampling.max_new_tokens,
            config.optimizer.warmup_ratio,
            config.run.steps * config.batch.updates,
        )
        assert found == (rate, kl, rank, prompts, tokens, warmup, optimizer_steps)
        assert config.lora.alpha == 2 * rank
        assert config.lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
        assert (config.algorithm.clip_range, config.batch.group_size) == ((0.1, 0.1), 8)
        assert config.environment.budget.prompt_tokens == 1024
        assert (config.optimizer.min_lr_ratio, config.environment.reasoning_effort) == (0.1, "medium")


@pytest.mark.parametrize("name", ["gpt_oss_20b", "gpt_oss_120b", "numina_grpo", "qwen3_30b_a3b"])
def test_the_probe_out_of_the_distribution_decides(name: str, tmp_path: Path) -> None:
    """As the guidelines have it: greedy, on other problems than the pool's, and two drops in a row end the run; 18 problems of AIME
    are asked every 10 steps, and end nothing. Each probe is a file of the packaged preparation, of its size."""
    config = preset(name, tmp_path)
    within, outside, aime = config.eval
    assert (within.role, within.problems, within.fatal_drops) == ("in_distribution", 200, 0)
    assert (outside.role, outside.sampled.name, outside.fatal_drops) == ("out_of_distribution", "greedy_pass@1", 2)
    assert (aime.every_steps, aime.sampled.name, aime.fatal_drops) == (10, "greedy_pass@1", 0)
    prepared = load_preparation(Path("numina"))
    sizes = prepared.splits.model_dump() | {"ood_probe": 0}
    for probe in prepared.probes:
        sizes[probe.name] = sizes.get(probe.name, 0) + probe.size
    for one in config.eval:
        assert one.environment is not None
        file = Path(one.environment.task_pool.path)  # type: ignore[union-attr]
        assert file.parent == Path(prepared.directory)
        assert sizes[file.stem] == one.problems
        assert one.environment.reasoning_effort == config.environment.reasoning_effort
        assert one.environment.system_by_format == config.environment.system_by_format


@pytest.mark.parametrize("name", ["gpt_oss_20b", "gpt_oss_120b", "numina_grpo", "qwen3_30b_a3b"])
def test_the_guidelines_smoke_criteria_end_a_preset_in_its_first_steps(name: str, tmp_path: Path) -> None:
    config = preset(name, tmp_path)
    assert config.monitor.first_steps == "stop"
    assert config.monitor.solve_rate.band == (0.2, 0.6)


def test_what_fits_a_gpu_of_80_gb(tmp_path: Path) -> None:
    """Beside its cache, which takes what is left. Adapters of 20B and 30B fit, 120B takes 234 GB in weights alone."""

    def needed(name: str) -> float:
        config = preset(name, tmp_path)
        parts = estimate(config, size_of(config))
        return sum(part for key, part in parts.items() if key not in ("key-value cache", "copy for a checkpoint")) / 1e9

    assert needed("gpt_oss_20b") == pytest.approx(41.8 + 3.4, abs=3)
    assert 61 < needed("qwen3_30b_a3b") < 76
    assert 234 < needed("gpt_oss_120b") < 260
    # All weights: bf16, gradients and three numbers of the optimizer in fp32, and the reference of the KL term.
    assert needed("qwen3_0.6b") == pytest.approx(0.596 * (2 + 4 + 12 + 2) + 3.5, abs=1)
