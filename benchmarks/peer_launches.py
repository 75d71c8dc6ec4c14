"""Launches of verl, slime and prime-rl for one RL workload, each in the trainer's own keys.

nmoe's side is what `nmoe config import` makes of the same launch, so that both sides have their settings from one place.
tests/benchmarks/test_peer_launches.py holds each launch against the trainer's keys, and its import against the workload.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workload:
    """GRPO on sums: `prompts` problems of `group` samples a step, one update. `data` has train.jsonl and train.parquet."""

    model: Path
    data: Path
    steps: int
    prompts: int = 32
    group: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 512
    micro_tokens: int = 16384
    learning_rate: float = 1e-6
    temperature: float = 1.0
    clip: float = 0.2
    seed: int = 1


REWARD = '''"""The reward of verl and slime: 1 for the right number at the end."""


def _right(text: str, label: str) -> float:
    return float(text.strip().rstrip(".").endswith(str(label)))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return _right(solution_str, ground_truth)


async def scored(args: object, sample: object, **_: object) -> float:
    return _right(sample.response, sample.label)  # type: ignore[attr-defined]
'''


def verl(work: Workload) -> str:
    """GRPO as verl has it: the mean over tokens, a ratio that is also bounded for negative advantages, engines beside training."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    keys: dict[str, object] = {
        "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False, "data.train_files": work.data / "train.parquet",
        "data.val_files": work.data / "train.parquet", "data.train_batch_size": work.prompts, "data.seed": work.seed,
        "data.max_prompt_length": work.prompt_tokens, "data.max_response_length": work.completion_tokens,
        "actor_rollout_ref.model.path": work.model, "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.optim.lr": work.learning_rate, f"{actor}.ppo_mini_batch_size": work.prompts, f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": work.micro_tokens, f"{actor}.clip_ratio_low": work.clip,
        f"{actor}.clip_ratio_high": work.clip, f"{actor}.use_kl_loss": False, f"{actor}.loss_agg_mode": "token-mean",
        f"{rollout}.name": "vllm", f"{rollout}.n": work.group, f"{rollout}.temperature": work.temperature,
        f"{rollout}.tensor_model_parallel_size": 1, f"{rollout}.gpu_memory_utilization": 0.5,
        f"{rollout}.log_prob_use_dynamic_bsz": True, "reward.custom_reward_function.path": work.data / "reward.py",
        "reward.custom_reward_function.name": "compute_score", "trainer.total_training_steps": work.steps,
        "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.save_freq": -1, "trainer.test_freq": -1,
        "trainer.val_before_train": False, "trainer.resume_mode": "disable", "trainer.logger": "[console]",
        "trainer.default_local_dir": work.data / "out" / "verl",
    }  # fmt: skip
    return shlex.join(["python", "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in keys.items())])


def slime(work: Workload) -> str:
    """GRPO as slime has it, with the loss over tokens; engines beside training. The shape of the model is Qwen3-0.6B's."""
    keys: dict[str, object] = {
        "actor-num-nodes": 1, "actor-num-gpus-per-node": 1, "num-gpus-per-node": 1, "rollout-num-gpus-per-engine": 1,
        "colocate": None, "hf-checkpoint": work.model, "ref-load": f"{work.model}_torch_dist", "save": work.data / "out" / "slime",
        "prompt-data": work.data / "train.jsonl", "input-key": "prompt", "label-key": "label", "apply-chat-template": None,
        "custom-rm-path": "reward.scored", "num-rollout": work.steps, "rollout-batch-size": work.prompts,
        "n-samples-per-prompt": work.group, "global-batch-size": work.prompts * work.group, "seed": work.seed,
        "rollout-max-prompt-len": work.prompt_tokens, "rollout-max-response-len": work.completion_tokens,
        "rollout-temperature": work.temperature, "use-dynamic-batch-size": None, "max-tokens-per-gpu": work.micro_tokens,
        "advantage-estimator": "grpo", "eps-clip": work.clip, "calculate-per-token-loss": None, "lr": work.learning_rate,
        "lr-decay-style": "constant", "optimizer": "adam", "attention-dropout": 0.0, "hidden-dropout": 0.0,
        "sglang-mem-fraction-static": 0.5, "num-layers": 28, "hidden-size": 1024, "ffn-hidden-size": 3072,
        "num-attention-heads": 16, "group-query-attention": None, "num-query-groups": 8, "kv-channels": 128, "vocab-size": 151936,
        "swiglu": None, "normalization": "RMSNorm", "norm-epsilon": 1e-6, "rotary-base": 1000000, "qk-layernorm": None,
        "use-rotary-position-embeddings": None, "disable-bias-linear": None,
    }  # fmt: skip
    words = [word for key, value in keys.items() for word in (f"--{key}", *([] if value is None else [str(value)]))]
    return shlex.join(["python", "train.py", *words])


def prime_rl(work: Workload) -> str:
    """prime-rl's default algorithm, with the environment `--environment`: a trainer on one GPU, an engine on another, at once."""
    keys: dict[str, object] = {
        "model.name": work.model, "max-steps": work.steps, "seq-len": work.micro_tokens, "output-dir": work.data / "out" / "prime",
        "orchestrator.batch-size": work.prompts * work.group, "orchestrator.group-size": work.group,
        "orchestrator.train.sampling.max-completion-tokens": work.completion_tokens,
        "orchestrator.train.sampling.temperature": work.temperature, "orchestrator.train.env.0.id": "sums",
        "trainer.optim.lr": work.learning_rate, "trainer.loss.dppo-mask-low": work.clip, "trainer.loss.dppo-mask-high": work.clip,
        "deployment.num-train-gpus": 1, "deployment.num-infer-gpus": 1, "inference.parallel.tp": 1,
    }  # fmt: skip
    return shlex.join(["uv", "run", "rl", *(word for key, value in keys.items() for word in (f"--{key}", str(value)))])


@dataclass(frozen=True)
class Peer:
    """A trainer to compare with: its launch, what has to be importable, the GPUs that it takes, and what else it needs."""

    launch: Callable[[Workload], str]
    package: str
    gpus: int
    needs: str


PEERS: Mapping[str, Peer] = {
    "verl": Peer(verl, "verl", 1, "an interpreter with verl 0.9.1 and vLLM (--python)"),
    "slime": Peer(
        slime,
        "slime",
        1,
        "an interpreter with slime, Megatron and SGLang (--python), slime's checkout (--directory), and the model as its converter "
        "writes it, in MODEL_torch_dist",
    ),
    "prime-rl": Peer(
        prime_rl,
        "prime_rl",
        2,
        "prime-rl's checkout (--directory), its interpreter (--python), and an environment `sums` in it",
    ),
}
