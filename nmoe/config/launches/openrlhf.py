"""OpenRLHF: `openrlhf.cli.train_ppo_ray`, `train_sft`, `train_dpo` and `train_rm`.

Keys are spelled as in 0.11.2 (`--actor.adam.lr`); 0.9.3 had the aliases (`--actor_learning_rate`). Defaults are from the
argument parsers in `openrlhf/cli` of both versions. The batch is counted in samples (`trainer/ppo_trainer.py`: steps are prompts
times samples divided by train.batch_size), advantages are in `trainer/ppo_utils/experience_maker.py`, losses in `models/loss.py`.
"""

from __future__ import annotations

from typing import Any

from nmoe.config.launches.concepts import betas, columns, critic, lora, model, offload, optimizer, overlong
from nmoe.config.launches.rows import Converted, Program, Reading, Row, number, same, switch, together, whole, without
from nmoe.config.launches.shared import (
    ADVANTAGES,
    DIVERGENCES,
    EVALUATED,
    GROUPS_DROPPED,
    PRECISIONS,
    at_home,
    colocated,
    end_of_schedule,
    examples,
    grader,
    kl,
    name_of,
    name_of_dataset,
    nearest,
    pool,
    probe,
    records,
    reward_model,
    uncorrected,
    updates,
    words,
)

_SHARED_ALIASES = {
    "save_path": "ckpt.output_dir", "save_steps": "ckpt.save_steps", "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "logging_steps": "logger.logging_steps", "eval_steps": "eval.steps", "ckpt_path": "ckpt.path",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem", "load_checkpoint": "ckpt.load_enable", "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "micro_train_batch_size": "train.micro_batch_size", "train_batch_size": "train.batch_size", "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable", "zero_stage": "ds.zero_stage", "param_dtype": "ds.param_dtype",
    "flash_attn": "ds.attn_implementation",
    "zpg": "ds.zpg",
    "adam_offload": "ds.adam_offload", "attn_implementation": "ds.attn_implementation",
    "use_liger_kernel": "ds.use_liger_kernel",
    "grad_accum_dtype": "ds.grad_accum_dtype", "overlap_comm": "ds.overlap_comm", "deepcompile": "ds.deepcompile",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer", "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "max_epochs": "train.max_epochs", "ring_attn_size": "ds.ring_attn_size", "ring_head_stride": "ds.ring_attn_head_stride",
    "load_in_4bit": "ds.load_in_4bit", "lora_rank": "ds.lora.rank", "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "lora_dropout": "ds.lora.dropout", "packing_samples": "ds.packing_samples", "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "max_samples": "data.max_samples", "input_key": "data.input_key", "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template", "max_len": "data.max_len", "use_wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org", "wandb_group": "logger.wandb.group", "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name", "use_tensorboard": "logger.tensorboard_dir",
    "value_head_prefix": "ds.value_head_prefix",
}  # fmt: skip

_PPO_ALIASES = _SHARED_ALIASES | {
    "ref_num_nodes": "ref.num_nodes", "ref_num_gpus_per_node": "ref.num_gpus_per_node", "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node", "colocate_actor_ref": "train.colocate_actor_ref",
    "actor_num_nodes": "actor.num_nodes", "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "critic_num_nodes": "critic.num_nodes",
    "critic_num_gpus_per_node": "critic.num_gpus_per_node", "colocate_critic_reward": "train.colocate_critic_reward",
    "colocate_all_models": "train.colocate_all", "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size", "vllm_sync_backend": "vllm.sync_backend",
    "vllm_sync_with_ray": "vllm.sync_with_ray", "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enforce_eager": "vllm.enforce_eager",
    "vllm_enable_sleep": "vllm.enable_sleep", "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size", "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant", "enable_ema": "train.enable_ema",
    "ema_beta": "train.ema_beta", "deepspeed_enable_sleep": "ds.enable_sleep",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu", "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "num_episodes": "train.num_episodes", "rollout_batch_size": "rollout.batch_size",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size", "micro_rollout_batch_size": "rollout.micro_batch_size",
    "max_norm": "actor.max_norm", "l2": "actor.adam.weight_decay", "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip", "value_clip": "critic.value_clip", "lambd": "algo.advantage.lambd",
    "gamma": "algo.advantage.gamma",
    "normalize_reward": "reward.normalize_enable", "top_p": "rollout.top_p", "temperature": "rollout.temperature",
    "freezing_actor_steps": "critic.freezing_steps", "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "save_value_network": "critic.save_value_network", "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "lr_warmup_ratio": "actor.lr_warmup_ratio", "lr_scheduler": "actor.lr_scheduler", "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon", "init_kl_coef": "algo.kl.init_coef", "policy_loss_type": "actor.policy_loss_type",
    "kl_estimator": "algo.kl.estimator", "aux_loss_coef": "actor.aux_loss_coef", "entropy_loss_coef": "actor.entropy_coef",
    "adam_betas": "actor.adam.betas", "reward_clip_range": "reward.clip_range",
    "advantage_estimator": "algo.advantage.estimator",
    "use_kl_loss": "algo.kl.use_loss", "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "pretrain": "actor.model_name_or_path", "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "critic_pretrain": "critic.model_name_or_path", "ref_reward_offload": "ref.offload",
    "agent_func_path": "train.agent_func_path",
    "prompt_data": "data.prompt_dataset", "prompt_data_probs": "data.prompt_probs", "prompt_split": "data.prompt_split",
    "eval_temperature": "eval.temperature", "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "label_key": "data.label_key",
    "dynamic_filtering": "algo.dynamic_filtering_enable", "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
}  # fmt: skip

_SUPERVISED_ALIASES = _SHARED_ALIASES | {
    "gradient_checkpointing": "model.gradient_checkpointing_enable", "max_norm": "max_norm", "l2": "adam.weight_decay",
    "gradient_checkpointing_use_reentrant": "model.gradient_checkpointing_reentrant", "aux_loss_coef": "model.aux_loss_coef",
    "pretrain": "model.model_name_or_path", "learning_rate": "adam.lr", "lr_warmup_ratio": "lr_warmup_ratio",
    "lr_scheduler": "lr_scheduler",
    "pretrain_mode": "model.pretrain_mode_enable", "adam_betas": "adam.betas", "dataset": "data.dataset",
    "dataset_probs": "data.dataset_probs",
    "dataset_split": "data.dataset_split", "multiturn": "data.multiturn", "output_key": "data.output_key",
    "tokenizer_chat_template": "data.tokenizer_chat_template", "beta": "model.beta", "ipo": "model.ipo_enable",
    "label_smoothing": "model.label_smoothing", "nll_loss_coef": "model.nll_loss_coef",
    "ref_pretrain": "ref.model_name_or_path",
    "ref_offload": "ref.offload", "prompt_key": "data.prompt_key", "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key",
    "compute_fp32_loss": "model.compute_fp32_loss_enable", "margin_loss": "model.margin_loss_enable", "loss": "model.loss_type",
}  # fmt: skip

# Keys that 0.9.3 had and 0.11.2 has not: lengths, and how vLLM's probabilities are corrected.
_OF_0_9 = (
    "prompt_max_len",
    "generate_max_len",
    "enable_vllm_is_correction",
    "vllm_is_correction_type",
    "vllm_is_truncated_threshold",
)


def _is_old(reading: Reading) -> bool:
    """Whether the launch is written for 0.9.3, by its spelling."""
    return any(one.key in reading.program.aliases or one.key in _OF_0_9 for one in reading.given.values())


def _lengths(reading: Reading) -> tuple[int, int]:
    """Returns the most tokens of a prompt and of a completion."""
    if _is_old(reading):
        return reading.whole("prompt_max_len", 1024) or 1024, reading.whole("generate_max_len", 1024) or 1024
    longest = reading.whole("data.max_len")
    return 0, reading.whole("rollout.max_new_tokens", longest) or longest


def _of_lengths(reading: Reading) -> Converted:
    prompt, completion = _lengths(reading)
    if not _is_old(reading):
        reading.differs(
            "data.max_len bounds prompt and completion together; nmoe bounds completions by sampling.max_new_tokens, and the "
            "sum by the model's "
            "context"
        )
    return {"environment.budget.prompt_tokens": prompt or None, "sampling.max_new_tokens": completion}


def _batch(reading: Reading) -> Converted:
    prompts, group = reading.whole("rollout.batch_size"), reading.whole("rollout.n_samples_per_prompt", 1)
    steps = updates(reading, prompts * group, reading.number("train.batch_size"), prompts, "train_batch_size")
    return {"batch.prompts_per_step": prompts, "batch.group_size": group, "batch.updates_per_step": steps}


def _microbatch(reading: Reading) -> Converted:
    if reading.yes("train.dynamic_batch_enable"):
        return {"batch.tokens_per_microbatch": reading.whole("train.max_tokens_per_gpu")}
    prompt, completion = _lengths(reading)
    longest = prompt + completion if _is_old(reading) else max(completion, reading.whole("data.max_len"))
    default = 4 if _is_old(reading) else 1
    count = reading.whole("train.micro_batch_size", default) if reading.has("train.micro_batch_size") else default
    return {"batch.tokens_per_microbatch": max(1, count) * longest}


def _advantage(reading: Reading) -> Converted:
    name = str(reading["algo.advantage.estimator"])
    unscaled = reading.yes("algo.advantage.no_std_norm")
    if name == "reinforce_baseline":
        if not unscaled:
            reading.differs(
                "reinforce_baseline subtracts the group's mean and then divides by the deviation over the batch's tokens; "
                "nmoe's dr_grpo does "
                "not divide"
            )
        return {"algorithm.advantage": "dr_grpo"}
    if name == "flash_reinforce":
        reading.differs(
            "flash_reinforce subtracts the mean of the rollout batch; nmoe's reinforce_pp divides by its deviation, too"
        )
        return {"algorithm.advantage": "reinforce_pp"}
    if unscaled and name in ("gae", "reinforce"):
        reading.differs(
            f"no_advantage_std_norm: nmoe's {ADVANTAGES[name]} divides advantages by their deviation over the batch"
        )
    return {"algorithm.advantage": nearest(reading, "algo.advantage.estimator", ADVANTAGES, "grpo")}


def _loss(reading: Reading) -> Converted:
    bounds = reading["actor.eps_clip_low_high"]
    if bounds is None:
        bounds = (reading["actor.eps_clip"],) * 2
    low, high = bounds
    found: dict[str, Any] = {"algorithm.clip_low": float(low), "algorithm.clip_high": float(high)}
    kind = nearest(reading, "actor.policy_loss_type", {"ppo": "clip", "gspo": "gspo"}, "clip")
    bound = reading["actor.dual_clip"]
    if kind == "gspo":
        if bound:
            reading.differs(f"dual_clip = {bound}: nmoe's gspo does not bound the ratio of negative advantages")
        return {**found, "algorithm.loss": "gspo"}
    if bound:
        return {**found, "algorithm.loss": "dual_clip", "algorithm.dual_clip_bound": float(bound)}
    return {**found, "algorithm.loss": "clip"}


def _aggregation(reading: Reading) -> Converted:
    if reading["actor.policy_loss_type"] == "gspo":
        return {"algorithm.aggregation": "sequence"}
    if not _is_old(reading):
        names = words("algorithm.aggregation")
        return {"algorithm.aggregation": nearest(reading, "actor.loss_agg_mode", names, "token")}
    # 0.9.3 takes the mean over a micro-batch's tokens, and then over micro-batches: with one sequence each, over sequences.
    if not reading.yes("train.dynamic_batch_enable") and reading.whole("train.micro_batch_size", 4) == 1:
        return {"algorithm.aggregation": "sequence"}
    reading.differs(
        "OpenRLHF 0.9.3 takes the mean of the loss over the tokens of each micro-batch; nmoe over all tokens of the "
        "whole update"
    )
    return {"algorithm.aggregation": "token"}


def _kl(reading: Reading) -> Converted:
    coef = reading["algo.kl.init_coef"]
    if not coef:
        return {"algorithm.kl_coef": 0.0}
    estimator = nearest(reading, "algo.kl.estimator", DIVERGENCES, "k1")
    if reading.yes("algo.kl.use_loss"):
        weighted = reading.yes("algo.kl.unbiased_gradient")
        if weighted and reading.whole("vllm.num_engines"):
            reading.differs(
                "kl.unbiased_gradient weighs by the ratio to the learner before the update, nmoe by the ratio to the engine"
            )
        return kl(coef, "loss", estimator, weighted)
    if str(reading["algo.advantage.estimator"]) not in ("gae", "reinforce"):
        reading.differs(
            "the KL penalty of each token is added behind the group's baseline; nmoe subtracts a sample's sum from its "
            "reward before the baseline"
        )
    return kl(coef, "reward", estimator)


def _precision(reading: Reading) -> Converted:
    # Before 0.9 there was a switch, `--bf16`.
    return {
        "model.precision": "bfloat16"
        if reading.yes("bf16")
        else nearest(reading, "ds.param_dtype", PRECISIONS, "float32")
    }


def _schedule(prefix: str) -> Row:
    name, warmup, least = f"{prefix}lr_scheduler", f"{prefix}lr_warmup_ratio", f"{prefix}min_lr_ratio"

    def convert(reading: Reading) -> Converted:
        kind = str(reading[name])
        end = end_of_schedule(reading, kind, lambda: reading[least] if "min_lr" in kind else None)
        share = 0.0 if kind == "constant" else float(reading.number(warmup))
        return {"optimizer.min_lr_ratio": end, "optimizer.warmup_ratio": share or None}

    return together(
        {name: "optimizer.min_lr_ratio", warmup: "optimizer.warmup_ratio", least: "optimizer.min_lr_ratio"},
        convert,
        "linear warm-up, then a half cosine to a share of the peak; constant schedules end at 1",
    )


_LORA = lora("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules")


def _correction(reading: Reading) -> Converted:
    is_off = (
        not reading.yes("enable_vllm_is_correction")
        if _is_old(reading)
        else reading["algo.advantage.is_correction_level"] == "off"
    )
    if is_off:
        updates = int(_batch(reading)["batch.updates_per_step"]) * reading.whole("train.max_epochs", 1)
        return uncorrected(reading, updates, reading.whole("vllm.num_engines") > 0)
    if reading["actor.policy_loss_type"] == "gspo":
        reading.differs(
            "gspo with a correction takes the ratio to the engine and corrects nothing else; nmoe's ratio is to the learner "
            "before the update, unless a step has one update"
        )
        return {"algorithm.correction": "none"}
    if _is_old(reading):
        low, high = reading["vllm_is_truncated_threshold"] or (0.5, 5.0)
        kind = str(reading["vllm_is_correction_type"] or "tis")
    else:
        mode = nearest(reading, "algo.advantage.is_correction_mode", {"mask": "icepop", "clip": "tis"}, "icepop")
        level = nearest(reading, "algo.advantage.is_correction_level", {"token": mode, "seq": "mis"}, mode)
        bounds = reading["algo.advantage.is_correction_threshold"]
        low, high = (0.0, bounds) if not isinstance(bounds, list) else bounds if len(bounds) == 2 else (0.0, bounds[0])
        kind = level
        if reading["algo.advantage.is_correction_gating"] not in (None, "ratio"):
            reading.differs(
                f"is_correction_gating = {reading['algo.advantage.is_correction_gating']}: nmoe's windows are of "
                f"the ratio alone"
            )
    if kind == "tis":
        if low:
            reading.differs(f"the ratio to vLLM is also held above {low}; nmoe's tis caps it from above alone")
        return {"algorithm.correction": "tis", "algorithm.correction_cap": float(high)}
    window = [float(low) or 1e-9, float(high)]
    if kind == "icepop":
        return {"algorithm.correction": "mask", "algorithm.correction_window": window}
    reading.differs(
        "tokens of sequences inside the window keep their ratio uncapped; nmoe caps it at algorithm.correction_cap"
    )
    return {"algorithm.correction": "sequence_mask", "algorithm.correction_window": window}


def _placement(reading: Reading) -> Converted:
    engines = reading.whole("vllm.num_engines")
    if engines <= 0:
        return {}
    found: dict[str, Any] = {
        "engine.kind": "vllm",
        "placement.engines": engines,
        "placement.learner_gpus": reading.whole("actor.num_nodes", 1) * reading.whole("actor.num_gpus_per_node", 8),
        "placement.tensor_parallel": reading.whole("vllm.tensor_parallel_size", 1),
        "placement.memory_share": float(reading.number("vllm.gpu_memory_utilization", 0.95)),
    }
    if reading.yes("train.colocate_all") and not reading.yes("train.async_enable"):
        return {**found, **colocated(reading)}
    if reading.whole("actor.num_nodes", 1) > 1:
        found["placement.launcher"] = "ray"
    return found


def _asynchrony(reading: Reading) -> Converted:
    if not reading.yes("train.async_enable"):
        return {}
    # 0.9.3 has a plain queue: one batch more is sampled while the queue is full.
    staleness = reading.whole("train.async_queue_size", 1) + _is_old(reading)
    in_flight = "stale_kv" if reading.yes("train.partial_rollout_enable") else "drain"
    return {"async.max_staleness": staleness, "async.in_flight": in_flight}


def _data(reading: Reading) -> Converted:
    found = pool(reading, "environment.task_pool", "data.prompt_dataset", "data.prompt_split", "", "data.max_samples")
    found["environment.env_id"] = name_of_dataset(reading["data.prompt_dataset"] or "problems")
    found["environment.task_pool.problem_field"] = reading["data.input_key"]
    found["environment.task_pool.answer_field"] = reading["data.label_key"]
    if reading["data.prompt_probs"]:
        reading.differs("prompt_data_probs: mix the datasets by the weights of [[environment.task_pool.sources]]")
    return found


def _rewards(reading: Reading) -> Converted:
    remote = reading["reward.remote_url"]
    if not remote and (paths := reading["reward.model_name_or_path"]):
        first, *others = str(paths).split(",")
        if others:
            reading.differs(
                f"{len(others) + 1} reward models: only the first is written; add the others as [[rewards]]"
            )
        return reward_model(reading, first)
    by = reading["train.agent_func_path"] or remote
    return grader(reading, [str(by)] if by else [])


def _evaluation(reading: Reading) -> Converted:
    every, dataset = reading.whole("eval.steps"), reading["eval.dataset"]
    if not dataset or every <= 0:
        return {}
    reading.fill("eval.0.environment.task", "as environment.task")
    reading.differs(EVALUATED.format(trainer="OpenRLHF"))
    name, training = name_of_dataset(dataset), name_of_dataset(reading["data.prompt_dataset"])
    return {
        "eval.0.every_steps": every,
        **probe(reading["eval.temperature"], reading["eval.n_samples_per_prompt"]),
        "eval.0.environment.env_id": f"{name}_eval" if name == training else name,
        "eval.0.environment.task": "math",
        **pool(reading, "eval.0.environment.task_pool", "eval.dataset", "eval.split"),
        "eval.0.environment.task_pool.problem_field": reading["data.input_key"],
        "eval.0.environment.task_pool.answer_field": reading["data.label_key"],
    }


def _directories(reading: Reading) -> Converted:
    path, named = reading["ckpt.path"] if reading.has("ckpt.path") else None, reading["logger.wandb.run_name"]
    out = reading["ckpt.output_dir"] if reading.has("ckpt.output_dir") else None
    parent, _, last = at_home(path or out or "").rstrip("/").rpartition("/")
    found: dict[str, Any] = {
        "run.name": name_of(named) or name_of(last) if named or last else None,
        "run.directory": parent or None,
    }
    if out and path:
        found["checkpoint.export_directory"] = at_home(out).rstrip("/").rpartition("/")[0] or "."
    return found


_RESUME = together(
    {"ckpt.load_enable": "run.resume"},
    lambda r: {"run.resume": "auto" if r.yes("ckpt.load_enable") else None},
    "true: auto",
)
_DIRECTORIES = together(
    {
        "ckpt.path": "run.directory",
        "ckpt.output_dir": ("run.directory", "checkpoint.export_directory"),
        "logger.wandb.run_name": "run.name",
    },
    _directories,
    "the last part of the path is the run's name",
)


def _sinks(reading: Reading) -> Converted:
    to = ["wandb"] if reading["logger.wandb.key"] else []
    to += ["tensorboard"] if reading["logger.tensorboard_dir"] else []
    return {"sinks.to": to or None, "sinks.project": reading["logger.wandb.project"] if "wandb" in to else None}


_SINKS = together(
    {"logger.wandb.key": "sinks.to", "logger.tensorboard_dir": "sinks.to", "logger.wandb.project": "sinks.project"},
    _sinks,
    "the sinks; the key of W&B is not written",
    secret=True,
)


def _filtering(reading: Reading) -> Converted:
    if not reading.yes("algo.dynamic_filtering_enable"):
        return {"batch.max_refills": 0}
    low, high = reading["algo.dynamic_filtering_range"]
    if (low, high) != (0, 1):
        reading.differs(
            f"dynamic_filtering_reward_range {low} {high}: groups at the bounds are left out; nmoe's "
            f"batch.solve_rate keeps them"
        )
        return {"batch.max_refills": 8, "batch.solve_rate": [float(low), float(high)]}
    reading.differs("dynamic filtering samples until the batch is full; nmoe refills at most batch.max_refills times")
    return {"batch.max_refills": 8}


_OPERATION = (
    without("nmoe trains without DeepSpeed: [parallel] shards weights, gradients and optimizer over all ranks; the numbers "
            "are the same",
            "ds.zero_stage", "ds.zpg", "ds.overlap_comm", "ds.grad_accum_dtype", "ds.deepcompile", "ds.enable_sleep",
            "ds.use_universal_ckpt",
            "local_rank"),
    without("nmoe chooses its own kernels of attention and of the loss", "ds.attn_implementation", "ds.use_liger_kernel",
        "ds.packing_samples",
            "ds.experts_implementation"),
    without("nmoe's checkpoints have one form, which resumes and exports (`nmoe export`)", "ckpt.save_hf", "ckpt.disable_ds",
        "ckpt.max_mem"),
    without("nmoe shards weights over ranks, and divides no layer or sequence", "ds.ring_attn_size", "ds.ring_attn_head_stride",
        "ds.tensor_parallel_size"),
    without("nmoe trains adapters on a base in the run's precision", "ds.load_in_4bit", neutral=False),
    without("nmoe's adapters have no dropout", "ds.lora.dropout", neutral=0),
    without("nmoe has one form of activation checkpointing", "actor.gradient_checkpointing_reentrant",
        "model.gradient_checkpointing_reentrant"),
    without("every step is recorded", "logger.logging_steps"),
    without("W&B reads entity and group from its own variables, WANDB_ENTITY and WANDB_RUN_GROUP", "logger.wandb.org",
        "logger.wandb.group"),
    without("tokenizers of the package tokenizers are always used", "data.disable_fast_tokenizer"),
    without("a run reads its data in its own process", "data.dataloader_num_workers"),
    without("models are read from directories and the Hugging Face hub", "use_ms"),
    without('nmoe\'s runs repeat bit for bit with model.numerics = "exact"', "train.full_determinism_enable"),
    without("the best checkpoint is chosen by the first probe", "ckpt.best_metric_key"),
)  # fmt: skip

_MUON = "OpenRLHF's Muon takes steps of muon.lr; nmoe's moves weights as far as AdamW does, at its learning rate"

_PPO_ROWS: tuple[Row, ...] = (
    model("actor.model_name_or_path"),
    together({"ds.param_dtype": "model.precision", "bf16": "model.precision"}, _precision, "bf16: bfloat16; fp16: float16"),
    switch("actor.gradient_checkpointing_enable", "model.checkpoint_activations"),
    together({"actor.aux_loss_coef": "model.router_aux_loss_coef"},
        lambda r: {"model.router_aux_loss_coef": float(r["actor.aux_loss_coef"]) or None},
             "the same; 0 is nmoe's default in RL"),
    _LORA,
    together({"rollout.batch_size": "batch.prompts_per_step", "rollout.n_samples_per_prompt": "batch.group_size",
              "train.batch_size": ("batch.updates_per_step", "batch.prompts_per_step")}, _batch,
             "prompts, samples of each, and prompts x samples / train.batch_size updates: train.batch_size counts samples"),
    whole("train.max_epochs", "batch.passes_per_step"),
    together(dict.fromkeys(("train.micro_batch_size", "train.dynamic_batch_enable", "train.max_tokens_per_gpu"),
        "batch.tokens_per_microbatch"), _microbatch,
             "sequences times the longest prompt and completion; with dynamic batches the tokens themselves"),
    together({"algo.dynamic_filtering_enable": "batch.max_refills", "algo.dynamic_filtering_range": "batch.solve_rate"},
        _filtering, "0 refills without dynamic filtering"),
    number("train.num_episodes", "run.episodes"),
    same("train.seed", "run.seed"),
    together({"prompt_max_len": "environment.budget.prompt_tokens", "generate_max_len": "sampling.max_new_tokens",
              "data.max_len": ("sampling.max_new_tokens",), "rollout.max_new_tokens": "sampling.max_new_tokens"}, _of_lengths,
             "the most tokens of a prompt and of a completion"),
    number("rollout.temperature", "sampling.temperature"),
    number("rollout.top_p", "sampling.top_p"),
    together(dict.fromkeys(("algo.advantage.estimator", "algo.advantage.no_std_norm"), "algorithm.advantage"), _advantage,
             "gae: gae; reinforce: reinforce_pp; rloo: rloo; reinforce_baseline: dr_grpo; group_norm: grpo; dr_grpo: dr_grpo"),
    together({"actor.policy_loss_type": "algorithm.loss", "actor.eps_clip": ("algorithm.clip_low", "algorithm.clip_high"),
              "actor.eps_clip_low_high": ("algorithm.clip_low", "algorithm.clip_high"),
              "actor.dual_clip": "algorithm.dual_clip_bound"}, _loss, "ppo: clip, with a dual_clip: dual_clip; gspo: gspo"),
    together({"actor.loss_agg_mode": "algorithm.aggregation"}, _aggregation,
             "0.11.2: token-mean: token; seq-mean-token-mean: sequence. 0.9.3: sequence for micro-batches of one sequence, "
             "else token"),
    together({"algo.kl.init_coef": "algorithm.kl_coef", "algo.kl.use_loss": "algorithm.kl_in",
              "algo.kl.estimator": "algorithm.kl_estimator", "algo.kl.unbiased_gradient": "algorithm.kl_importance_weights"}, _kl,
             "in the reward, or with use_kl_loss in the loss"),
    together({"actor.entropy_coef": "algorithm.entropy_coef"},
        lambda r: {"algorithm.entropy_coef": float(r["actor.entropy_coef"] or 0)}, "the same"),
    together({"enable_vllm_is_correction": "algorithm.correction", "vllm_is_correction_type": "algorithm.correction",
              "vllm_is_truncated_threshold": ("algorithm.correction_cap", "algorithm.correction_window"),
              "algo.advantage.is_correction_level": "algorithm.correction",
              "algo.advantage.is_correction_mode": "algorithm.correction",
              "algo.advantage.is_correction_gating": "algorithm.correction",
              "algo.advantage.is_correction_threshold": ("algorithm.correction_cap", "algorithm.correction_window")}, _correction,
             "tis and clip: tis; icepop and mask of tokens: mask; mis and mask of sequences: sequence_mask"),
    overlong("reward.overlong_buffer_len", "reward.overlong_penalty_factor"),
    optimizer("actor.optim", "actor.muon.momentum", _MUON),
    number("actor.adam.lr", "optimizer.learning_rate"),
    critic("algo.advantage.estimator", "critic.adam.lr", "critic.model_name_or_path", "algo.advantage.gamma",
           "algo.advantage.lambd", "critic.value_clip", "critic.freezing_steps"),
    _schedule("actor."),
    betas("actor.adam.betas"),
    number("actor.adam.eps", "optimizer.eps"),
    number("actor.adam.weight_decay", "optimizer.weight_decay"),
    number("actor.max_norm", "optimizer.max_grad_norm"),
    together({"data.prompt_dataset": "environment.task_pool.path", "data.prompt_split": "environment.task_pool.split",
              "data.prompt_probs": "environment.task_pool.sources", "data.max_samples": "environment.task_pool.max_examples",
              "data.input_key": "environment.task_pool.problem_field", "data.label_key": "environment.task_pool.answer_field"},
             _data, "a file, or a dataset of the hub, and its columns"),
    together(dict.fromkeys(("reward.remote_url", "train.agent_func_path", "reward.model_name_or_path"), "environment.rewards"),
        _rewards, "reward code is replaced by a task to be checked; a reward model goes into [[rewards]]"),
    together({"eval.dataset": "eval.0.environment", "eval.steps": "eval.0.every_steps", "eval.split": "eval.0.environment",
              "eval.temperature": "eval.0.temperature", "eval.n_samples_per_prompt": "eval.0.samples"}, _evaluation,
             "[[eval]] on another environment; -1 steps: no evaluation"),
    together({"vllm.num_engines": "placement.engines", "vllm.tensor_parallel_size": "placement.tensor_parallel",
              "vllm.gpu_memory_utilization": "placement.memory_share", "actor.num_nodes": "placement.learner_gpus",
              "actor.num_gpus_per_node": "placement.learner_gpus", "train.colocate_all": "placement.layout"}, _placement,
             "vLLM on its own GPUs, or colocated with the ranks that train"),
    together({"train.async_enable": "async.max_staleness", "train.async_queue_size": "async.max_staleness",
              "train.partial_rollout_enable": "async.in_flight"}, _asynchrony, "the queue's size, and one more in 0.9.3"),
    offload("ds.adam_offload"),
    without("a patch of 0.9.3 for weights on the host: parallel.offload = cpu keeps both weights and optimizer there", "offload"),
    whole("ckpt.save_steps", "checkpoint.every_steps", "the same; -1, only at the end, leaves nmoe's default"),
    whole("ckpt.max_num", "checkpoint.keep"),
    _RESUME,
    _DIRECTORIES,
    _SINKS,
    without("nmoe's prompts are rendered by the environment's format: the tokenizer's chat template, Harmony, or plain text "
            "(environment.format)",
            "data.apply_chat_template"),
    without("put the words around the question into environment.system, or into the data", "data.input_template",
        neutral=False),
    without("nmoe has no EMA of the weights", "train.enable_ema", neutral=False),
    without("nmoe has no EMA of the weights", "train.ema_beta"),
    without("the KL coefficient is constant in nmoe", "algo.kl.target", neutral=False),
    without("the KL coefficient is constant in nmoe", "algo.kl.horizon"),
    without("nmoe normalises no rewards beside the advantage estimator", "reward.normalize_enable", neutral=False),
    without("nmoe clips no rewards; tasks pay between 0 and 1", "reward.clip_range"),
    without("nmoe does not scale the rewards of truncated answers; algorithm.mask_truncated leaves them out of the loss",
            "reward.stop_properly_penalty_coef", neutral=False),
    without("nmoe mixes no pretraining loss in", "ptx_coef"),
    without("the reference and the reward model lie on the ranks that train", "ref.num_nodes", "ref.num_gpus_per_node",
        "reward.num_nodes",
            "reward.num_gpus_per_node", "train.colocate_actor_ref", "train.colocate_critic_reward", "ref.offload",
            "reward.offload",
            "critic.num_nodes", "critic.num_gpus_per_node"),
    without("engine.weights chooses how weights are published (docs/guides/engines.md)", "vllm.sync_backend",
        "vllm.sync_with_ray"),
    without("an option of vLLM's own; engine.args passes options of its command line on", "vllm.enable_prefix_caching",
        "vllm.enforce_eager",
            "vllm.enable_sleep"),
    without("nmoe's engine batches by itself", "rollout.vllm_generate_batch_size", "rollout.micro_batch_size",
        "rollout.max_tokens_per_gpu"),
    without("the critic is saved in every checkpoint", "critic.save_value_network"),
    without("nmoe's value head has its own name", "ds.value_head_prefix"),
    without("nmoe trains on text", "data.image_key", "data.max_images_per_prompt", "actor.freeze_visual_encoder"),
    without(_MUON, "actor.muon.*", "critic.muon.*"),
    without("the critic has the policy's optimizer", "critic.optim", neutral="adam"),
    without("the critic has the settings of [optimizer], and its own learning rate", "critic.adam.betas",
        "critic.adam.eps", "critic.adam.weight_decay",
            "critic.lr_scheduler", "critic.lr_warmup_ratio", "critic.min_lr_ratio", "critic.max_norm"),
    without("a switch of how OpenRLHF works; it changes no number", "perf", "actor_init_on_gpu"),
    *_OPERATION,
)  # fmt: skip


def _tokens(sequences: int) -> Any:
    def convert(reading: Reading) -> Converted:
        longest, count = reading.whole("data.max_len"), reading.whole("train.batch_size")
        return examples(reading, count, longest, reading.whole("train.micro_batch_size", 8), sequences)

    return convert


def _held_out(reading: Reading) -> Converted:
    every, dataset = reading.whole("eval.steps"), reading["eval.dataset"]
    if not dataset or every <= 0:
        return {}
    return {
        "eval.0.every_steps": every,
        "records.held_out_path": at_home(dataset),
        "records.held_out_split": reading["eval.split"],
    }


def _supervised(sequences: int) -> tuple[Row, ...]:
    return (
        model("model.model_name_or_path"),
        together({"ds.param_dtype": "model.precision", "bf16": "model.precision"}, _precision, "bf16: bfloat16; fp16: float16"),
        switch("model.gradient_checkpointing_enable", "model.checkpoint_activations"),
        number("model.aux_loss_coef", "model.router_aux_loss_coef"),
        _LORA,
        together({"train.batch_size": "records.tokens_per_step", "train.micro_batch_size": "batch.tokens_per_microbatch",
                  "data.max_len": ("records.tokens_per_step", "batch.tokens_per_microbatch")},
                 _tokens(sequences), "sequences times their longest length, as nmoe counts tokens"),
        number("train.max_epochs", "records.epochs"),
        same("train.seed", "run.seed"),
        optimizer("optim", "muon.momentum", _MUON),
        number("adam.lr", "optimizer.learning_rate"),
        _schedule(""),
        betas("adam.betas"),
        number("adam.eps", "optimizer.eps"),
        number("adam.weight_decay", "optimizer.weight_decay"),
        number("max_norm", "optimizer.max_grad_norm"),
        together({"data.dataset": "records.path", "data.dataset_split": "records.split", "data.max_samples": "records.path"},
                 lambda r: records(r, "data.dataset", "data.dataset_split", "", "data.max_samples"),
                 "a file, or a dataset of the hub"),
        together({"eval.dataset": "records.held_out_path", "eval.steps": "eval.0.every_steps",
                  "eval.split": "records.held_out_split"}, _held_out, "-1 steps: no evaluation"),
        offload("ds.adam_offload"),
        whole("ckpt.save_steps", "checkpoint.every_steps", "the same; -1, only at the end, leaves nmoe's default"),
        whole("ckpt.max_num", "checkpoint.keep"),
        _RESUME,
        _DIRECTORIES,
        _SINKS,
        without("mix datasets by the weights of [[records.sources]]", "data.dataset_probs", neutral=False),
        without("records are rendered by records.format: the tokenizer's chat template, Harmony, or plain text",
            "data.apply_chat_template",
                "data.tokenizer_chat_template"),
        without("put the words around a prompt into the data", "data.input_template"),
        without(_MUON, "muon.lr", "muon.ns_steps", "muon.nesterov", "muon.no_nesterov"),
        *_OPERATION,
    )  # fmt: skip


_SFT_ROWS = (
    *_supervised(1),
    columns(prompt="data.input_key", completion="data.output_key"),
    without("records with messages are read as conversations by their columns", "data.multiturn"),
    without("plain text is pretraining: `nmoe pretrain`", "model.pretrain_mode_enable", neutral=False),
    without("part of the data is chosen by records.split", "train_split"),
)  # fmt: skip


def _preference_loss(reading: Reading) -> Converted:
    found: dict[str, Any] = {
        "preference.beta": float(reading["model.beta"]),
        "preference.sft_weight": float(reading["model.nll_loss_coef"]),
    }
    if reading.yes("model.ipo_enable"):
        reading.differs("ipo: OpenRLHF takes sums of log ratios over the tokens of a completion, nmoe means")
        return {**found, "preference.loss": "ipo"}
    smoothing = float(reading["model.label_smoothing"])
    return {**found, "preference.loss": "sigmoid", "preference.label_smoothing": smoothing}


_PAIRS = (
    *_supervised(2),
    columns(prompt="data.prompt_key", chosen="data.chosen_key", rejected="data.rejected_key"),
)  # fmt: skip

_DPO_ROWS = (
    *_PAIRS,
    together({"model.beta": "preference.beta", "model.ipo_enable": "preference.loss",
              "model.label_smoothing": "preference.label_smoothing", "model.nll_loss_coef": "preference.sft_weight"},
             _preference_loss,
             "sigmoid, or ipo"),
    without("the reference is the model that the run starts from", "ref.model_name_or_path"),
    without("the reference lies on the ranks that train", "ref.offload"),
)  # fmt: skip

_RM_ROWS = (
    *_PAIRS,
    without("nmoe's reward models learn by the sigmoid loss of Bradley and Terry", "model.loss_type", neutral="sigmoid"),
    without("a margin for each pair is not read; reward_model.margin is one for all", "model.margin_loss_enable",
        neutral=False),
    without("losses are computed in float32", "model.compute_fp32_loss_enable"),
    without("nmoe's value head has its own name", "ds.value_head_prefix"),
)  # fmt: skip

_SUPERVISED_DEFAULTS: dict[str, Any] = {
    "ds.param_dtype": "bf16", "model.gradient_checkpointing_enable": False, "model.aux_loss_coef": 0, "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "train.batch_size": 128, "train.seed": 42, "adam.betas": [0.9, 0.95], "adam.eps": 1e-8, "adam.weight_decay": 0.0,
    "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.03, "min_lr_ratio": 0.1, "max_norm": 1.0,
    "data.dataset_split": "train",
    "eval.steps": -1, "ckpt.max_num": 3, "optim": "adam", "muon.momentum": 0.95,
}  # fmt: skip

_SOURCE = "openrlhf 0.11.2 and 0.9.3, openrlhf/cli/{}.py"

PPO = Program(
    trainer="OpenRLHF", name="openrlhf ppo", command="rl train", source=_SOURCE.format("train_ppo_ray"),
    modules=("train_ppo_ray", "openrlhf.cli.train_ppo"), rows=_PPO_ROWS, aliases=_PPO_ALIASES,
    defaults={
        "ds.param_dtype": "bf16", "actor.gradient_checkpointing_enable": False, "actor.aux_loss_coef": 0, "ds.lora.rank": 0,
        "ds.lora.alpha": 16,
        "rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 1, "train.batch_size": 128, "train.max_epochs": 1,
        "train.max_tokens_per_gpu": 16192,
        "algo.dynamic_filtering_enable": False, "algo.dynamic_filtering_range": (0, 1), "train.num_episodes": 1,
        "train.seed": 42,
        "data.max_len": 2048, "rollout.temperature": 1.0, "rollout.top_p": 1.0, "algo.advantage.estimator": "gae",
        "algo.advantage.no_std_norm": False, "actor.policy_loss_type": "ppo", "actor.eps_clip": 0.2,
        "actor.loss_agg_mode": "token-mean",
        "algo.kl.init_coef": 0.01, "algo.kl.use_loss": False, "algo.kl.estimator": "k1", "algo.kl.unbiased_gradient": False,
        "algo.advantage.is_correction_level": "off", "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio", "algo.advantage.is_correction_threshold": [0.5, 5.0],
        "critic.adam.lr": 9e-6,
        "algo.advantage.gamma": 1, "algo.advantage.lambd": 1, "critic.value_clip": 0.5, "critic.freezing_steps": -1,
        "actor.adam.lr": 1e-6,
        "actor.lr_scheduler": "cosine_with_min_lr", "actor.lr_warmup_ratio": 0.03, "actor.min_lr_ratio": 0.1,
        "actor.adam.betas": (0.9, 0.95),
        "actor.adam.eps": 1e-8, "actor.adam.weight_decay": 0.0, "actor.max_norm": 1.0, "data.prompt_split": "train",
        "data.input_key": "input",
        "eval.steps": -1, "eval.split": "train", "eval.temperature": 0.6, "eval.n_samples_per_prompt": 4,
        "vllm.tensor_parallel_size": 1,
        "vllm.gpu_memory_utilization": 0.95, "actor.num_nodes": 1, "actor.num_gpus_per_node": 8, "train.async_queue_size": 1,
        "ckpt.max_num": 3,
        "logger.wandb.project": "openrlhf_train_ppo", "actor.optim": "adam", "actor.muon.momentum": 0.95,
    },
    always=(GROUPS_DROPPED.format(trainer="OpenRLHF"),),
)  # fmt: skip

SFT = Program(
    trainer="OpenRLHF", name="openrlhf sft", command="sft", source=_SOURCE.format("train_sft"),
        modules=("openrlhf.cli.train_sft", "cli.train_sft"),
    rows=_SFT_ROWS, aliases=_SUPERVISED_ALIASES,
    defaults=_SUPERVISED_DEFAULTS | {"adam.lr": 5e-6, "train.max_epochs": 2, "data.max_len": 2048, "data.input_key": "input",
    "train.micro_batch_size": 8,
                                     "eval.split": "train", "logger.wandb.project": "openrlhf_train_sft"},
)  # fmt: skip

DPO = Program(
    trainer="OpenRLHF", name="openrlhf dpo", command="dpo", source=_SOURCE.format("train_dpo"),
        modules=("openrlhf.cli.train_dpo", "cli.train_dpo"),
    rows=_DPO_ROWS, aliases=_SUPERVISED_ALIASES,
    defaults=_SUPERVISED_DEFAULTS | {"adam.lr": 1e-5, "train.max_epochs": 1, "data.max_len": 512, "model.beta": 0.1,
    "model.ipo_enable": False,
                                     "model.label_smoothing": 0.0, "model.nll_loss_coef": 0, "train.micro_batch_size": 8,
                                     "eval.split": "test",
                                     "data.chosen_key": "chosen", "data.rejected_key": "rejected",
                                     "logger.wandb.project": "openrlhf_train_dpo"},
)  # fmt: skip

RM = Program(
    trainer="OpenRLHF", name="openrlhf rm", command="reward", source=_SOURCE.format("train_rm"),
        modules=("openrlhf.cli.train_rm", "cli.train_rm"),
    rows=_RM_ROWS, aliases=_SUPERVISED_ALIASES,
    defaults=_SUPERVISED_DEFAULTS | {"adam.lr": 9e-6, "train.max_epochs": 1, "data.max_len": 512, "train.micro_batch_size": 1,
    "eval.split": "train",
                                     "model.loss_type": "sigmoid", "data.chosen_key": "chosen", "data.rejected_key": "rejected",
                                     "logger.wandb.project": "openrlhf_train_rm"},
)  # fmt: skip

PROGRAMS = (PPO, SFT, DPO, RM)
