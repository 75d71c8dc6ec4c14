"""slime: `train.py` and `train_async.py`.

Keys and defaults are from slime/utils/arguments.py at commit 002fa9d, and Megatron's own arguments. A step samples
rollout_batch_size prompts and has one update for each global_batch_size samples; rewards are normalised in groups
(`_post_process_rewards`), and a loss is the mean of each sample's mean (`policy_loss_function`).
"""

from __future__ import annotations

from typing import Any

from nmoe.config.launches.concepts import critic, model, optimizer, template
from nmoe.config.launches.rows import Converted, Program, Reading, Row, number, same, together, whole, without
from nmoe.config.launches.shared import (
    ADVANTAGES,
    DIVERGENCES,
    EVALUATED,
    GROUPS_DROPPED,
    at_home,
    colocated,
    end_of_schedule,
    grader,
    kl,
    name_of,
    name_of_dataset,
    of_the_run,
    pool,
    probe,
    uncorrected,
    updates,
)


def _batch(reading: Reading) -> Converted:
    prompts, group = reading.whole("rollout_batch_size"), max(1, reading.whole("n_samples_per_prompt", 1))
    samples = prompts * group
    steps = reading.whole("num_steps_per_rollout")
    at_once = samples / steps if steps else reading.number("global_batch_size")
    found = updates(reading, samples, at_once, prompts, "global_batch_size")
    return {"batch.prompts_per_step": prompts or None, "batch.group_size": group, "batch.updates_per_step": found}


def _updates(reading: Reading) -> int:
    return int(_batch(reading)["batch.updates_per_step"])


def _microbatch(reading: Reading) -> Converted:
    if reading.yes("use_dynamic_batch_size"):
        return {"batch.tokens_per_microbatch": reading.whole("max_tokens_per_gpu") or None}
    longest = reading.whole("rollout_max_prompt_len") + reading.whole("rollout_max_response_len")
    return {"batch.tokens_per_microbatch": max(1, reading.whole("micro_batch_size", 1)) * longest or None}


def _length(reading: Reading) -> Converted:
    if (steps := reading.whole("num_rollout")) > 0:
        return {"run.steps": steps}
    return {"run.episodes": float(reading.number("num_epoch", 1))}


def _advantage(reading: Reading) -> Converted:
    name = str(reading["advantage_estimator"])
    whitened = reading.yes("normalize_advantages")
    if name in ("grpo", "gspo", "cispo"):
        if whitened:
            reading.differs("normalize_advantages: nmoe normalises over the batch in reinforce_pp and gae alone")
        if reading.yes("disable_rewards_normalization"):
            reading.differs(
                "disable_rewards_normalization: slime subtracts no baseline from rewards; nmoe the group's mean"
            )
            return {"algorithm.advantage": "dr_grpo"}
        return {"algorithm.advantage": "dr_grpo" if reading.yes("disable_grpo_std_normalization") else "grpo"}
    if name == "reinforce_plus_plus_baseline":
        if whitened:
            reading.differs(
                f"{name} with normalize_advantages divides by the batch's deviation; nmoe's dr_grpo does not"
            )
    elif not whitened:
        reading.differs(
            f"{name} without normalize_advantages: nmoe's {ADVANTAGES.get(name)} divides by the batch's deviation"
        )
    if name == "reinforce_plus_plus" and reading.number("gamma", 1) != 1:
        reading.differs(f"gamma = {reading['gamma']}: nmoe's reinforce_pp does not discount")
    if name not in ADVANTAGES:
        reading.differs(f"advantage_estimator = {name}: nmoe has no such estimator; grpo is written")
    return {"algorithm.advantage": ADVANTAGES.get(name, "grpo")}


def _loss(reading: Reading) -> Converted:
    low, high = float(reading.number("eps_clip", 0.2)), reading["eps_clip_high"]
    high = low if high is None else float(high)
    kind, bound = str(reading["advantage_estimator"]), reading["eps_clip_c"]
    if reading["pg_loss_type"] not in (None, "ppo"):
        reading.differs(
            f"pg_loss_type = {reading['pg_loss_type']}: nmoe has no such loss; PPO's clipped ratio is written"
        )
    if kind == "cispo":
        reading.differs(f"slime may also bound the ratio of cispo from below, at {1 - low:g}; nmoe does not")
        return {"algorithm.loss": "cispo", "algorithm.clip_high": high}
    found: dict[str, Any] = {"algorithm.clip_low": low, "algorithm.clip_high": high}
    if kind == "gspo":
        if bound is not None:
            reading.differs(f"eps_clip_c = {bound}: nmoe's gspo does not bound the ratio of negative advantages")
        return {**found, "algorithm.loss": "gspo"}
    if bound is not None:
        return {**found, "algorithm.loss": "dual_clip", "algorithm.dual_clip_bound": float(bound)}
    return {**found, "algorithm.loss": "clip"}


def _aggregation(reading: Reading) -> Converted:
    per_token = reading.yes("calculate_per_token_loss")
    if per_token and reading["advantage_estimator"] == "gspo":
        reading.differs("gspo with calculate_per_token_loss: nmoe's gspo takes the mean of sequences")
        per_token = False
    return {"algorithm.aggregation": "token" if per_token else "sequence"}


def _kl(reading: Reading) -> Converted:
    in_loss = reading.yes("use_kl_loss") and reading.number("kl_loss_coef") > 0
    if in_loss:
        if reading.number("kl_coef"):
            reading.differs("KL in the loss and in the reward: nmoe has one of them; the loss is written")
        weighted = reading.yes("use_unbiased_kl")
        if weighted:
            reading.differs(
                "use_unbiased_kl weighs by the ratio to the learner before the update, nmoe by the ratio to the engine"
            )
        return kl(reading["kl_loss_coef"], "loss", DIVERGENCES[str(reading["kl_loss_type"])], weighted)
    if str(reading["advantage_estimator"]) in ("grpo", "gspo", "cispo") or not (coef := reading.number("kl_coef")):
        return {"algorithm.kl_coef": 0.0}
    return kl(coef, "reward", DIVERGENCES[str(reading["kl_loss_type"])])


def _correction(reading: Reading) -> Converted:
    if reading["custom_tis_function_path"] is not None:
        reading.differs("custom_tis_function_path: nmoe has tis, mask and sequence_mask; tis is written")
    if not reading.yes("use_tis"):
        if not reading.yes("use_rollout_logprobs"):
            return uncorrected(reading, _updates(reading), True)
        if _updates(reading) > 1:
            reading.differs("use_rollout_logprobs: nmoe's ratios are to the learner before several updates of a step")
        return {"algorithm.correction": "none"}
    if low := reading.number("tis_clip_low"):
        reading.differs(f"tis_clip_low = {low:g}: nmoe's tis caps the ratio from above alone")
    return {"algorithm.correction": "tis", "algorithm.correction_cap": max(1.0, float(reading.number("tis_clip", 2.0)))}


def _schedule(reading: Reading) -> Converted:
    """Megatron counts the warm-up in optimizer steps."""
    kind = str(reading["lr_decay_style"])
    least = end_of_schedule(reading, kind, lambda: reading.number("min_lr") / reading.number("lr", 1e-6))
    found: dict[str, Any] = {"optimizer.min_lr_ratio": least}
    if share := reading.number("lr_warmup_fraction"):
        return {**found, "optimizer.warmup_ratio": float(share)}
    if steps := reading.whole("lr_warmup_iters"):
        return {**found, "optimizer.warmup_steps": of_the_run(reading, steps, _updates(reading), "steps of warm-up")}
    return found


def _filtering(reading: Reading) -> Converted:
    prompts, sampled = reading.whole("rollout_batch_size"), reading.whole("over_sampling_batch_size")
    found: dict[str, Any] = {"batch.oversampling": sampled / prompts if sampled > prompts > 0 else None}
    if (path := reading["dynamic_sampling_filter_path"]) is None:
        return {**found, "batch.max_refills": 0}
    name = str(path).rpartition(".")[2]
    reading.differs(
        f"{name} samples until the batch is full; nmoe refills at most batch.max_refills times, by its own rule"
    )
    return {**found, "batch.max_refills": 8}


def _data(reading: Reading) -> Converted:
    found = pool(reading, "environment.task_pool", "prompt_data")
    found["environment.env_id"] = name_of_dataset(reading["prompt_data"] or "problems")
    found["environment.task_pool.problem_field"] = reading["input_key"]
    found["environment.task_pool.answer_field"] = reading["label_key"]
    return found


def _rewards(reading: Reading) -> Converted:
    custom, kind = reading["custom_rm_path"], reading["rm_type"]
    return grader(reading, [str(custom)] if custom else [f"rm_type = {kind}"] if kind else [])


def _evaluation(reading: Reading) -> Converted:
    every, named = reading.whole("eval_interval"), reading["eval_prompt_data"]
    named = ["aime", named] if isinstance(named, str) else named
    if every <= 0 or not isinstance(named, list) or len(named) < 2:
        return {}
    if len(named) > 2:
        reading.differs(
            f"eval_prompt_data: {len(named) // 2} datasets; only the first is written; add an [[eval]] for each"
        )
    reading.fill("eval.0.environment.task", "as environment.task")
    reading.differs(EVALUATED.format(trainer="slime"))
    heat = reading["eval_temperature"]
    heat = reading["rollout_temperature"] if heat is None else heat
    prefix, path = "eval.0.environment.task_pool", at_home(named[1])
    return {
        "eval.0.every_steps": every,
        **probe(heat, reading["n_samples_per_eval_prompt"]),
        "eval.0.max_tokens": reading["eval_max_response_len"],
        "eval.0.environment.env_id": f"{name_of(named[0])}_eval",
        "eval.0.environment.task": "math",
        f"{prefix}.type": "parquet" if path.endswith(".parquet") else "jsonl",
        f"{prefix}.path": path,
        f"{prefix}.problem_field": reading["eval_input_key"] or reading["input_key"],
        f"{prefix}.answer_field": reading["eval_label_key"] or reading["label_key"],
    }


def _placement(reading: Reading) -> Converted:
    nodes = max(1, reading.whole("actor_num_nodes", 1))
    gpus, parallel = (
        nodes * reading.whole("actor_num_gpus_per_node", 8),
        reading.whole("rollout_num_gpus_per_engine", 1),
    )
    share = reading["sglang_mem_fraction_static"]
    found: dict[str, Any] = {
        "engine.kind": "sglang",
        "placement.learner_gpus": gpus,
        "placement.tensor_parallel": parallel,
        "placement.memory_share": None if share is None else float(share),
    }
    sampling = reading.whole("rollout_num_gpus")
    if reading.yes("colocate"):
        return {**found, "placement.engines": max(1, (sampling or gpus) // parallel), **colocated(reading, nodes)}
    if not sampling:
        reading.fill("placement.engines", "the engines that sample: rollout_num_gpus is not given")
    found |= {"placement.engines": max(1, sampling // parallel)}
    return {**found, "placement.launcher": "ray"} if nodes > 1 else found


def _asynchrony(reading: Reading) -> Converted:
    """train_async.py samples the next step while it trains, which makes samples one version old."""
    return {"async.max_staleness": 1, "async.in_flight": "drain"} if "train_async" in reading.module else {}


def _run(reading: Reading) -> Converted:
    parent, _, last = at_home(reading["save"] or "").rstrip("/").rpartition("/")
    return {"run.name": name_of(last) if last else None, "run.directory": parent or None}


def _sinks(reading: Reading) -> Converted:
    to = ["wandb"] if reading.yes("use_wandb") else []
    to += ["tensorboard"] if reading.yes("use_tensorboard") else []
    return {"sinks.to": to or None, "sinks.project": reading["wandb_project"] if "wandb" in to else None}


_MEGATRON = "nmoe shards weights over ranks, and divides no layer or sequence; the numbers are the same"
_SHAPE = "nmoe reads the shape from the checkpoint"

_ROWS: tuple[Row, ...] = (
    model("hf_checkpoint"),
    together({"recompute_granularity": "model.checkpoint_activations"},
             lambda r: {"model.checkpoint_activations": r["recompute_granularity"] is not None}, "full or selective: true"),
    together({"bf16": "model.precision"}, lambda r: {"model.precision": "bfloat16"}, "bfloat16, with master weights in float32"),
    together({"optimizer_cpu_offload": "parallel.offload"},
             lambda r: {"parallel.offload": "cpu" if r.yes("optimizer_cpu_offload") else None}, "true: cpu"),
    together({"rollout_batch_size": "batch.prompts_per_step", "n_samples_per_prompt": "batch.group_size",
              "global_batch_size": "batch.updates_per_step", "num_steps_per_rollout": "batch.updates_per_step"}, _batch,
             "prompts, samples of each, and one update for each global_batch_size samples"),
    together(dict.fromkeys(("micro_batch_size", "use_dynamic_batch_size", "max_tokens_per_gpu"), "batch.tokens_per_microbatch"),
             _microbatch, "samples times the longest prompt and response; with use_dynamic_batch_size the tokens themselves"),
    together({"dynamic_sampling_filter_path": "batch.max_refills", "over_sampling_batch_size": "batch.oversampling"}, _filtering,
             "0 refills without a filter; over_sampling_batch_size / rollout_batch_size: oversampling"),
    together({"num_rollout": "run.steps", "num_epoch": "run.episodes"}, _length, "the same"),
    same("seed", "run.seed"),
    whole("rollout_max_response_len", "sampling.max_new_tokens"),
    whole("rollout_max_prompt_len", "environment.budget.prompt_tokens", "the same; prompts that are longer are left out"),
    number("rollout_temperature", "sampling.temperature"),
    number("rollout_top_p", "sampling.top_p"),
    whole("rollout_top_k", "sampling.top_k"),
    together(dict.fromkeys(("advantage_estimator", "disable_grpo_std_normalization", "disable_rewards_normalization",
             "normalize_advantages"), "algorithm.advantage"), _advantage,
             "grpo, gspo and cispo: grpo, without std: dr_grpo; ppo: gae; reinforce_plus_plus: reinforce_pp"),
    together({"eps_clip": "algorithm.clip_low", "eps_clip_high": "algorithm.clip_high", "eps_clip_c": "algorithm.dual_clip_bound",
              "pg_loss_type": "algorithm.loss"}, _loss, "clip; gspo and cispo by advantage_estimator; eps_clip_c: dual_clip"),
    together({"calculate_per_token_loss": "algorithm.aggregation"}, _aggregation, "true: token; else sequence"),
    together({"use_kl_loss": "algorithm.kl_in", "kl_loss_coef": "algorithm.kl_coef", "kl_loss_type": "algorithm.kl_estimator",
              "kl_coef": "algorithm.kl_coef", "use_unbiased_kl": "algorithm.kl_importance_weights"}, _kl,
             "use_kl_loss: in the loss; kl_coef: in the reward, not with grpo, gspo and cispo, which drop it"),
    whole("ref_update_interval", "algorithm.reference_every_steps"),
    number("entropy_coef", "algorithm.entropy_coef"),
    together({"use_tis": "algorithm.correction", "tis_clip": "algorithm.correction_cap", "tis_clip_low": "algorithm.correction",
              "use_rollout_logprobs": "algorithm.correction", "custom_tis_function_path": "algorithm.correction"}, _correction,
             "use_tis: tis"),
    number("lr", "optimizer.learning_rate"),
    critic("advantage_estimator", "critic_lr", "critic_load", "gamma", "lambd", "value_clip", "num_critic_only_steps", gae="ppo"),
    together({"lr_decay_style": "optimizer.min_lr_ratio", "min_lr": "optimizer.min_lr_ratio",
              "lr_warmup_iters": "optimizer.warmup_steps", "lr_warmup_fraction": "optimizer.warmup_ratio"}, _schedule,
             "linear warm-up, then a half cosine to min_lr / lr; a warm-up in optimizer steps"),
    optimizer("optimizer", "muon_momentum", "Megatron's moves weights by sqrt(rows or columns) times muon_extra_scale_factor (1), "
              "nmoe's by 0.2 of it, as far as AdamW: set optimizer.learning_rate for that"),
    number("adam_beta1", "optimizer.beta1"),
    number("adam_beta2", "optimizer.beta2"),
    number("adam_eps", "optimizer.eps"),
    number("weight_decay", "optimizer.weight_decay"),
    number("clip_grad", "optimizer.max_grad_norm"),
    together({"prompt_data": "environment.task_pool.path", "input_key": "environment.task_pool.problem_field",
              "label_key": "environment.task_pool.answer_field"}, _data, "a file, and its columns"),
    together({"rm_type": "environment.rewards", "custom_rm_path": "environment.rewards"}, _rewards,
             "reward code is replaced by a task to be checked"),
    together({"eval_interval": "eval.0.every_steps", "eval_prompt_data": "eval.0.environment",
              "n_samples_per_eval_prompt": "eval.0.samples", "eval_temperature": "eval.0.temperature",
              "eval_max_response_len": "eval.0.max_tokens", "eval_input_key": "eval.0.environment",
              "eval_label_key": "eval.0.environment"}, _evaluation, "[[eval]] on the first dataset"),
    template("apply_chat_template_kwargs"),
    together({"actor_num_nodes": "placement.learner_gpus", "actor_num_gpus_per_node": "placement.learner_gpus",
              "rollout_num_gpus": "placement.engines", "rollout_num_gpus_per_engine": "placement.tensor_parallel",
              "colocate": "placement.layout", "sglang_mem_fraction_static": "placement.memory_share"}, _placement,
             "SGLang on its own GPUs, or with colocate on those that train"),
    Row({}, "train_async.py: samples of one version before", _asynchrony),
    whole("save_interval", "checkpoint.every_steps"),
    together({"save": "run.directory"}, _run, "the last part of the path is the run's name"),
    together({"use_wandb": "sinks.to", "use_tensorboard": "sinks.to", "wandb_project": "sinks.project"}, _sinks, "the sinks"),
    # Without counterpart.
    without("nmoe trains no layers that predict tokens further on", "enable_mtp_training", neutral=False),
    without("nmoe trains no layers that predict tokens further on", "mtp_*"),
    without(_MEGATRON, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "distributed_*", "allgather_cp",
            "accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32", "attention_backend", "overlap_*",
            "use_precision_aware_optimizer", "recompute_method", "recompute_num_layers", "recompute_loss_function",
            "log_probs_*", "qwen_gdn_backend", "train_env_vars", "train_backend", "num_gpus_per_node", "offload*", "moe_*",
            "megatron_*", "decoder_*",
            "data_pad_size_multiplier", "deterministic_mode", "use_distributed_optimizer", "no_load_*", "finetune", "ckpt_format"),
    without(_SHAPE, "model_name", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
            "group_query_attention", "kv_channels", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "rotary_*",
            "rope_*",
            "no_rope_fusion", "mscale*", "multi_latent_attention", "*_lora_rank", "*_head_dim", "attention_output_gate",
            "apply_layernorm_1p", "spec", "norm_epsilon",
            "normalization", "swiglu", "disable_bias_linear", "use_rotary_position_embeddings",
            "untie_embeddings_and_output_weights", "qk_layernorm", "add_qkv_bias", "seq_length", "max_position_embeddings",
            "custom_model_provider_path", "megatron_config_path",
            "post_self_attn_layernorm", "post_mlp_layernorm", "use_gated_attention"),
    without("nmoe keeps the optimizer's state", "use_stateless_adam", "reset_optimizer_states", neutral=False),
    without("an option of Megatron's Muon, which nmoe's does not have", "muon_*"),
    without("the models of nmoe's families have no dropout", "attention_dropout", "hidden_dropout", neutral=0.0),
    without("the reference and the start of training are the checkpoint that model.path names", "ref_load", "ref_ckpt_step",
            "load", "start_rollout_id", "no_save_optim", "async_save", "save_hf"),
    without("nmoe trains all parameters, or adapters by [lora]", "only_train_params_name_list", "freeze_params_name_list",
            neutral=None),
    without("nmoe trains all parameters, or adapters by [lora]", "freeze_indexer", neutral=False),
    without("engine.weights chooses how weights are published (docs/guides/engines.md)", "update_weight_*", "release_train",
            "custom_update_weight_post_write_path", "flush_cache_interval", "force_fp8_ue8m0_scale"),
    without("an option of the engine's own; engine.args passes options of its command line on", "sglang_*", "use_fault_tolerance",
            "rollout_health_*", "rollout_cleanup_timeout", "rollout_session_id", "rollout_external_engine_addrs", "router_*",
            "use_slime_router", "http_proxy",
            "use_distributed_post"),
    without("turns end at the end tokens of the model", "rollout_stop", "rollout_stop_token_ids", neutral=None),
    without("turns end at the end tokens of the model", "rollout_skip_special_tokens", "rollout_max_context_len"),
    without("write an environment of your own (docs/guides/environments.md)", "rollout_function_path",
            "custom_generate_function_path", "eval_function_path", "data_source_path", "rollout_sample_hook_path",
            "custom_*", "rollout_data_*", "rollout_storage_*", "rollout_queue_*", "rollout_io_concurrency",
            "rollout_sample_filter_path", "rollout_all_samples_process_path", "rollout_task_type",
            "rollout_buffer_url", "fetch_trajectory_retry_times", "min_batch_collection_ratio", "buffer_*"),
    without("nmoe's samples under way are kept by async.in_flight", "partial_rollout", neutral=False),
    without("nmoe's samples under way are kept by async.in_flight", "mask_offpolicy_in_partial_rollout"),
    without("a run reads its data in its own process, in an order drawn from its seed", "rollout_shuffle", "rollout_seed",
            "metadata_key", "tool_key", "multimodal_keys", "apply_chat_template", "balance_data", "balance_by_flops"),
    without("a part of the reward that nmoe does not know", "reward_key", "eval_reward_key", "group_rm", "rm_url"),
    without("nmoe's evaluations sample from the whole distribution", "eval_top_p", "eval_top_k", neutral=None),
    without("nmoe's evaluations have the run's lengths", "eval_max_prompt_len", "eval_min_new_tokens", "eval_max_context_len",
            "eval_tool_key", "eval_config", "skip_eval_before_train"),
    without("sft_loss is `nmoe sft`, and its data [records]; custom losses nmoe does not have", "loss_type", neutral="policy_loss"),
    without("nmoe trains on the tokens that the policy drew", "loss_mask_type"),
    without("losses that nmoe does not have", "use_score_centering", "use_opsm", neutral=False),
    without("losses that nmoe does not have", "score_centering_top_k", "opsm_delta", "disable_compute_advantages_and_returns"),
    without("nmoe replays routes by engine.routes", "use_routing_replay", "use_rollout_routing_replay",
            "routing_replay_prefetch_microbatches"),
    without("a teacher is [distillation] in nmoe: write distillation.teacher", "use_opd", neutral=False),
    without("a teacher is [distillation] in nmoe: write distillation.teacher", "opd_*"),
    without("every step is recorded", "wandb_*", "tb_*", "log_*", "disable_wandb_random_suffix", "use_rollout_entropy",
            "get_mismatch_metrics", "save_debug_*", "debug_*", "load_debug_*", "load_forge_*", "use_pytorch_profiler",
            "dump_details", "memory_*", "record_memory_history", "check_weight_update_equal",
            "ci_*"),
)  # fmt: skip

RL = Program(
    trainer="slime", name="slime", command="rl train", rows=_ROWS,
    source="slime at commit 002fa9d, slime/utils/arguments.py, and Megatron's arguments",
    modules=("slime.train", "train_async", "train"),
    defaults={
        "bf16": True, "n_samples_per_prompt": 1, "micro_batch_size": 1, "use_dynamic_batch_size": False,
        "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "seed": 1234, "advantage_estimator": "grpo",
        "disable_grpo_std_normalization": False, "disable_rewards_normalization": False, "normalize_advantages": False,
        "eps_clip": 0.2, "kl_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1",
        "use_unbiased_kl": False, "entropy_coef": 0.0, "use_tis": False, "tis_clip": 2.0, "tis_clip_low": 0,
        "use_rollout_logprobs": False, "lr": 1e-6, "critic_lr": 1e-6, "gamma": 1.0, "lambd": 1.0, "value_clip": 0.2,
        "num_critic_only_steps": 0, "lr_decay_style": "linear", "min_lr": 0.0, "lr_warmup_iters": 0, "adam_beta1": 0.9,
        "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.01, "clip_grad": 1.0, "calculate_per_token_loss": False,
        "input_key": "input", "n_samples_per_eval_prompt": 1, "actor_num_nodes": 1, "actor_num_gpus_per_node": 8,
        "rollout_num_gpus_per_engine": 1, "colocate": False, "use_wandb": False, "use_tensorboard": False,
        "optimizer": "adam", "muon_momentum": 0.95, "attention_dropout": 0.1, "hidden_dropout": 0.1, "loss_type": "policy_loss",
    },
    always=(GROUPS_DROPPED.format(trainer="slime"),),
)  # fmt: skip

PROGRAMS = (RL,)
