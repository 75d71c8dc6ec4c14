"""verl: `verl.trainer.main_ppo`, recipes on it such as DAPO, and `verl.trainer.sft_trainer`.

Keys and defaults are from verl 0.9.1 (`verl/trainer/config`); ALIASES and patterns have keys of older versions. Batches are
counted in prompts (`data.train_batch_size`, `actor.ppo_mini_batch_size`), advantages and losses are in
`verl/trainer/ppo/core_algos.py`.
"""

from __future__ import annotations

from typing import Any

from nmoe.config.launches.concepts import (
    betas,
    columns,
    critic,
    length,
    lora,
    model,
    offload,
    optimizer,
    overlong,
    resume,
    sinks,
    template,
)
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
    lora_targets,
    name_of,
    nearest,
    pool,
    probe,
    records,
    reward_model,
    uncorrected,
    updates,
    words,
)

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def _gpus(reading: Reading) -> int:
    return max(1, reading.whole("trainer.n_gpus_per_node", 8)) * max(1, reading.whole("trainer.nnodes", 1))


def _batch(reading: Reading) -> Converted:
    prompts, group = reading.whole("data.train_batch_size"), max(1, reading.whole(f"{_R}.n", 1))
    steps = updates(
        reading, prompts * group, reading.number(f"{_A}.ppo_mini_batch_size") * group, prompts, "ppo_mini_batch_size"
    )
    return {"batch.prompts_per_step": prompts, "batch.group_size": group, "batch.updates_per_step": steps}


def _microbatch(reading: Reading) -> Converted:
    if reading.yes(f"{_A}.use_dynamic_bsz"):
        return {"batch.tokens_per_microbatch": reading.whole(f"{_A}.ppo_max_token_len_per_gpu", 16384)}
    count = reading.whole(f"{_A}.ppo_micro_batch_size_per_gpu") or reading.whole(f"{_A}.ppo_micro_batch_size") // _gpus(
        reading
    )
    longest = reading.whole("data.max_prompt_length") + _longest(reading)
    return {"batch.tokens_per_microbatch": max(1, count) * longest if count else None}


def _longest(reading: Reading) -> int:
    """Returns the most tokens of a response: the rollout's own key counts over the data's, which is its default."""
    return reading.whole(f"{_R}.response_length") or reading.whole("data.max_response_length")


def _advantage(reading: Reading) -> Converted:
    name = str(reading["algorithm.adv_estimator"]).rpartition(".")[2].lower()
    if name in ("grpo", "grpo_vectorized") and not reading.yes("algorithm.norm_adv_by_std_in_grpo"):
        return {"algorithm.advantage": "dr_grpo"}
    if name == "gdpo":
        return {"algorithm.advantage": "grpo", "algorithm.multi_reward": "gdpo"}
    if name == "reinforce_plus_plus_baseline":
        reading.differs(
            f"{name} subtracts the group's mean and divides by the deviation over the batch; nmoe's dr_grpo does "
            f"not divide"
        )
    if name == "reinforce_plus_plus" and reading.number("algorithm.gamma", 1) != 1:
        reading.differs(f"algorithm.gamma = {reading['algorithm.gamma']}: nmoe's reinforce_pp does not discount")
    if name not in ADVANTAGES:
        reading.differs(f"adv_estimator = {name}: nmoe has no such estimator; grpo is written")
    return {"algorithm.advantage": ADVANTAGES.get(name, "grpo")}


def _clips(reading: Reading) -> tuple[float, float]:
    """Returns the two bounds. verl takes clip_ratio only where clip_ratio_low or clip_ratio_high is null, and both are 0.2 by
    default (`compute_policy_loss_vanilla`, `actor/actor.yaml`)."""
    sides = [f"{_A}.clip_ratio_{side}" for side in ("low", "high")]
    low, high = (reading.number(f"{_A}.clip_ratio" if reading[key] is None else key, 0.2) for key in sides)
    plain = reading.given.get(f"{_A}.clip_ratio")
    if plain is not None and not reading.has(*sides):
        reading.differs(
            f"clip_ratio = {plain.value}: verl takes its defaults of clip_ratio_low and clip_ratio_high, {low:g} and {high:g}, "
            f"over it, and so they are written"
        )
    return float(low), float(high)


def _loss(reading: Reading) -> Converted:
    mode = str(reading[f"{_A}.policy_loss.loss_mode"])
    low, high = _clips(reading)
    found: dict[str, Any] = {"algorithm.clip_low": low, "algorithm.clip_high": high}
    if mode == "gspo":
        return {**found, "algorithm.loss": "gspo"}
    if mode == "cispo":
        reading.differs(f"verl's cispo also bounds the ratio from below, at {1 - low:g}")
        return {"algorithm.loss": "cispo", "algorithm.clip_high": high}
    bound = float(reading.number(f"{_A}.clip_ratio_c", 3.0))
    if mode == "dppo_tv":
        reading.differs(
            f"dppo_tv is around the learner before the update, and caps the ratio at clip_ratio_c = {bound:g}; nmoe's dppo is "
            f"around the engine's probabilities, without a cap, and pulls the policy back to them"
        )
        return {**found, "algorithm.loss": "dppo"}
    if mode != "vanilla":
        reading.differs(f"policy_loss.loss_mode = {mode}: nmoe has no such loss; PPO's clipped ratio is written")
    # verl's loss is bounded for negative advantages, too, by clip_ratio_c.
    return {**found, "algorithm.loss": "dual_clip", "algorithm.dual_clip_bound": bound}


def _aggregation(reading: Reading) -> Converted:
    mode = str(reading[f"{_A}.loss_agg_mode"])
    if str(reading[f"{_A}.policy_loss.loss_mode"]) == "gspo" and mode != "seq-mean-token-mean":
        reading.differs(f"gspo with {mode}: nmoe's gspo takes the mean of sequences")
        return {"algorithm.aggregation": "sequence"}
    if mode == "seq-mean-token-sum":
        reading.differs(
            "seq-mean-token-sum divides sums over tokens by nothing; nmoe divides them by "
            "sampling.max_new_tokens: the gradient is that much smaller"
        )
    if mode == "seq-mean-token-sum-norm" and (scale := reading[f"{_A}.loss_scale_factor"]) not in (
        None,
        _longest(reading),
    ):
        reading.differs(f"loss_scale_factor = {scale}: nmoe divides sums over tokens by sampling.max_new_tokens")
    return {"algorithm.aggregation": nearest(reading, f"{_A}.loss_agg_mode", words("algorithm.aggregation"), "token")}


def _kl(reading: Reading) -> Converted:
    in_loss, in_reward = reading.yes(f"{_A}.use_kl_loss"), reading.yes("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        reading.differs("KL in the loss and in the reward: nmoe has one of them; the loss is written")
    if not in_loss and not in_reward:
        return {"algorithm.kl_coef": 0.0}
    coef = reading[f"{_A}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"]
    if not coef:
        return {"algorithm.kl_coef": 0.0}
    kind = str(reading[f"{_A}.kl_loss_type" if in_loss else "algorithm.kl_penalty"])
    plain = kind.removesuffix("+")
    if plain not in DIVERGENCES:
        reading.differs(f"KL by {kind}: nmoe has k1, k2 and k3; k1 is written")
    estimator = DIVERGENCES.get(plain, "k1")
    if in_loss and plain != kind and estimator != "k2":
        # `kl_penalty` of core_algos: the value of k1 or k3, the gradient of k2.
        reading.differs(f"KL by {kind} shows the value of {estimator} and has the gradient of k2, which is written")
        estimator = "k2"
    return kl(coef, "loss" if in_loss else "reward", estimator)


def _correction(reading: Reading) -> Converted:
    updates = int(_batch(reading)["batch.updates_per_step"]) * reading.whole(f"{_A}.ppo_epochs", 1)
    is_bypassed = reading.yes("algorithm.rollout_correction.bypass_mode")
    if is_bypassed and updates > 1:
        reading.differs(
            "bypass_mode takes the sampler's probabilities as the old policy's; nmoe, with several updates of a step, the "
            "learner's before them"
        )
    if (old := reading.number(f"{_A}.tis_imp_ratio_cap", -1)) > 0:
        return {"algorithm.correction": "tis", "algorithm.correction_cap": float(old)}
    kind = reading["algorithm.rollout_correction.rollout_is"]
    if kind is None or (is_bypassed and reading["algorithm.rollout_correction.loss_type"] != "reinforce"):
        return {"algorithm.correction": "none"} if is_bypassed else uncorrected(reading, updates, True)
    levels = {"token": "token", "sequence": "sequence"}
    if nearest(reading, "algorithm.rollout_correction.rollout_is", levels, "token") == "sequence":
        reading.differs(
            "rollout_is = sequence weighs by the product of a sequence's ratios; nmoe's tis weighs each token"
        )
    bounds = str(reading["algorithm.rollout_correction.rollout_is_threshold"]).split("_")
    if len(bounds) == 2:
        return {"algorithm.correction": "mask", "algorithm.correction_window": [float(bounds[0]), float(bounds[1])]}
    return {"algorithm.correction": "tis", "algorithm.correction_cap": float(bounds[0])}


def _filtering(reading: Reading) -> Converted:
    if not reading.yes("algorithm.filter_groups.enable"):
        return {"batch.max_refills": 0}
    most = reading.whole("algorithm.filter_groups.max_num_gen_batches")
    if most <= 0:
        reading.differs(
            "filter_groups without a bound samples until the batch is full; nmoe refills at most "
            "batch.max_refills times"
        )
    ratio = reading.number("data.gen_batch_size") / max(1, reading.whole("data.train_batch_size"))
    return {
        "batch.max_refills": most - 1 if most > 1 else 8 if most <= 0 else 0,
        "batch.oversampling": float(ratio) if ratio > 1 else None,
    }


def _schedule(prefix: str) -> Any:
    names = [f"{prefix}.{name}" for name in ("warmup_style", "lr_scheduler_type", "lr_scheduler")]

    def convert(reading: Reading) -> Converted:
        kind = str(next((one for name in names if (one := reading[name]) is not None), "constant"))
        found: dict[str, Any] = {
            "optimizer.min_lr_ratio": end_of_schedule(reading, kind, lambda: reading.number(f"{prefix}.min_lr_ratio"))
        }
        # The warm-up is in steps of the run, as verl moves its schedule on once a step.
        if (steps := reading.whole(f"{prefix}.lr_warmup_steps", -1)) > 0:
            return {**found, "optimizer.warmup_steps": steps}
        return {**found, "optimizer.warmup_ratio": float(reading.number(f"{prefix}.lr_warmup_steps_ratio")) or None}

    keys = {
        **dict.fromkeys([*names, f"{prefix}.min_lr_ratio"], "optimizer.min_lr_ratio"),
        f"{prefix}.lr_warmup_steps": "optimizer.warmup_steps",
        f"{prefix}.lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    }
    return together(keys, convert, "linear warm-up, then a half cosine to min_lr_ratio; constant: 1")


def _rows_of_optimizer(prefix: str) -> tuple[Row, ...]:
    return (
        number(f"{prefix}.lr", "optimizer.learning_rate"),
        _schedule(prefix),
        betas(f"{prefix}.betas"),
        number(f"{prefix}.weight_decay", "optimizer.weight_decay"),
        optimizer(f"{prefix}.optimizer"),
        without("nmoe's optimizers are its own", f"{prefix}.optimizer_impl", f"{prefix}.override_optimizer_config",
            f"{prefix}.zero_indexed_step"),
        without("the schedule ends with the run, or by optimizer.schedule_steps", f"{prefix}.total_training_steps",
            f"{prefix}.num_cycles"),
    )  # fmt: skip


def _lora(reading: Reading) -> Converted:
    if old := reading.whole(f"{_M}.lora_rank"):
        alpha, targets = reading.number(f"{_M}.lora_alpha", 16), reading[f"{_M}.target_modules"]
        return {"lora.rank": old, "lora.alpha": float(alpha), "lora.targets": lora_targets(reading, targets)}
    if new := reading.whole(f"{_M}.lora.rank"):
        return {"lora.rank": new, "lora.alpha": float(reading.number(f"{_M}.lora.alpha", 32))}
    return {}


def _placement(reading: Reading) -> Converted:
    kind = {"vllm": "vllm", "sglang": "sglang"}.get(str(reading[f"{_R}.name"]))
    if kind is None:
        if reading[f"{_R}.name"] not in (None, "hf", "???"):
            reading.differs(
                f"rollout.name = {reading[f'{_R}.name']}: nmoe samples with its own engine, vLLM or SGLang; its "
                f"own is left"
            )
        return {}
    gpus, parallel = _gpus(reading), max(1, reading.whole(f"{_R}.tensor_model_parallel_size", 2))
    found: dict[str, Any] = {
        "engine.kind": kind,
        "engine.max_sequences": reading.whole(f"{_R}.max_num_seqs", 1024),
        "placement.learner_gpus": gpus,
        "placement.tensor_parallel": parallel,
        "placement.memory_share": float(reading.number(f"{_R}.gpu_memory_utilization", 0.5)),
    }
    apart = reading.whole(f"{_R}.nnodes") * max(1, reading.whole(f"{_R}.n_gpus_per_node", 8))
    apart = apart or reading.whole("rollout.nnodes") * reading.whole("rollout.n_gpus_per_node", 8)
    if apart:
        return {**found, "placement.engines": max(1, apart // parallel), "placement.launcher": "ray"}
    layout = colocated(reading, reading.whole("trainer.nnodes", 1))
    return {**found, "placement.engines": max(1, gpus // parallel), **layout}


def _asynchrony(reading: Reading) -> Converted:
    """The threshold counts in shares of the samples between two synchronizations, each of which is one version."""
    if not reading.has("async_training.staleness_threshold"):
        return {}
    threshold = reading.number("async_training.staleness_threshold", 0.1)
    reading.differs(
        f"staleness_threshold = {threshold:g} bounds the share of stale samples; nmoe bounds the age of each sample, in "
        f"versions of the learner"
    )
    return {
        "async.max_staleness": max(1, round(threshold + 0.499)),
        "async.in_flight": "stale_kv" if reading.yes("async_training.partial_rollout") else "drain",
    }


def _data(reading: Reading) -> Converted:
    files = reading["data.train_files"]
    if not reading.has("data.train_files"):
        reading.fill("environment.task_pool.path", "the problems; the launch names none, and verl's default is written")
    found = pool(reading, "environment.task_pool", "data.train_files", limit="data.train_max_samples")
    first = files[0] if isinstance(files, list) and files else files
    parts = str(first).rstrip("/").split("/")
    stem = parts[-1].partition(".")[0]
    found["environment.env_id"] = (
        name_of(parts[-2] if stem in ("train", "test") and len(parts) > 1 else stem) or "problems"
    )
    found["environment.task_pool.problem_field"] = str(reading["data.prompt_key"])
    found["environment.task_pool.answer_field"] = "reward_model.ground_truth"
    return found


def _rewards(reading: Reading) -> Converted:
    if reading.yes("reward.reward_model.enable") and (model := reading["reward.reward_model.model_path"]):
        return reward_model(reading, model)
    if path := reading["reward.custom_reward_function.path"]:
        return grader(reading, [f"{path}:{reading['reward.custom_reward_function.name'] or 'compute_score'}"])
    return grader(reading, ["verl's scores by data_source (gsm8k and MATH are answers that the task `math` grades)"])


def _evaluation(reading: Reading) -> Converted:
    every, files = reading.whole("trainer.test_freq", -1), reading["data.val_files"]
    if every <= 0 or not files:
        return {}
    if not reading.has("data.val_files"):
        reading.fill(
            "eval.0.environment.task_pool.path", "the problems; the launch names none, and verl's default is written"
        )
    reading.fill("eval.0.environment.task", "as environment.task")
    reading.differs(EVALUATED.format(trainer="verl"))
    heat = reading.number(f"{_R}.val_kwargs.temperature") if reading.yes(f"{_R}.val_kwargs.do_sample") else 0
    samples = reading.whole(f"{_R}.val_kwargs.n", 1) if heat else 1
    first = str(files[0] if isinstance(files, list) else files).rstrip("/").split("/")
    name = name_of("_".join(first[-2:]).rpartition(".")[0]) or "evaluation"
    return {
        "eval.0.every_steps": every, **probe(heat, samples), "eval.0.environment.env_id": name,
        "eval.0.environment.task": "math",
        **pool(reading, "eval.0.environment.task_pool", "data.val_files", limit="data.val_max_samples"),
        "eval.0.environment.task_pool.problem_field": str(reading["data.prompt_key"]),
        "eval.0.environment.task_pool.answer_field": "reward_model.ground_truth",
    }  # fmt: skip


def _turns(reading: Reading) -> Converted:
    if not reading.yes(f"{_R}.multi_turn.enable"):
        return {}
    if reading[f"{_R}.multi_turn.tool_config_path"]:
        reading.fill(
            "environment.tools.use",
            f"the tools of {reading[f'{_R}.multi_turn.tool_config_path']}, as functions (docs/guides/tools.md)",
        )
    most = reading.whole(f"{_R}.multi_turn.max_assistant_turns") or reading.whole(f"{_R}.multi_turn.max_turns")
    return {"environment.budget.turns": most or None, "environment.budget.tool_output_chars": None}


def _run(reading: Reading) -> Converted:
    directory: str | None = f"checkpoints/{name_of(reading['trainer.project_name']) or 'verl_examples'}"
    if reading.has("trainer.default_local_dir"):
        directory = at_home(reading["trainer.default_local_dir"]).rstrip("/").rpartition("/")[0] or None
    return {"run.name": name_of(reading["trainer.experiment_name"]), "run.directory": directory}


_RUN = together(
    {
        "trainer.experiment_name": "run.name",
        "trainer.default_local_dir": "run.directory",
        "trainer.project_name": "run.directory",
    },
    _run,
    "the experiment's name; checkpoints/PROJECT",
)
_RESUME = resume("trainer.resume_mode", ("auto",), "resume_path", "auto: auto; disable: false")
_BUFFERS = (
    "reward_model.overlong_buffer",
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
)


def _overlong(reading: Reading) -> Converted:
    table = next((one for one in _BUFFERS if any(key.startswith(one) for key in reading.given)), _BUFFERS[0])
    return overlong(f"{table}.len", f"{table}.penalty_factor", f"{table}.enable").converted(reading)


_PPO_ROWS: tuple[Row, ...] = (
    model(f"{_M}.path"),
    same(f"{_M}.tokenizer_path", "model.tokenizer"),
    switch(f"{_M}.enable_gradient_checkpointing", "model.checkpoint_activations"),
    together({f"{_A}.fsdp_config.dtype": "model.precision"},
             lambda r: {"model.precision": nearest(r, f"{_A}.fsdp_config.dtype", PRECISIONS, "float32")},
             "the dtype that layers compute in; master weights are float32 in both"),
    offload(f"{_A}.fsdp_config.param_offload", f"{_A}.fsdp_config.offload_policy", f"{_A}.fsdp_config.optimizer_offload",
        f"{_A}.megatron.param_offload"),
    together({f"{_M}.lora_rank": "lora.rank", f"{_M}.lora_alpha": "lora.alpha", f"{_M}.target_modules": "lora.targets",
              f"{_M}.lora.rank": "lora.rank", f"{_M}.lora.alpha": "lora.alpha"}, _lora,
             "rank 0 trains all weights; all-linear: nmoe's default targets"),
    same(f"{_M}.lora_adapter_path", "lora.path"),
    together({"data.train_batch_size": "batch.prompts_per_step", f"{_R}.n": "batch.group_size",
              f"{_A}.ppo_mini_batch_size": "batch.updates_per_step"}, _batch,
             "all counted in prompts; train_batch_size / ppo_mini_batch_size updates"),
    whole(f"{_A}.ppo_epochs", "batch.passes_per_step"),
    together(dict.fromkeys((f"{_A}.ppo_micro_batch_size_per_gpu", f"{_A}.ppo_micro_batch_size", f"{_A}.use_dynamic_bsz",
        f"{_A}.ppo_max_token_len_per_gpu"), "batch.tokens_per_microbatch"), _microbatch,
             "sequences times the longest prompt and response; with use_dynamic_bsz the tokens themselves"),
    together({"algorithm.filter_groups.enable": "batch.max_refills", "algorithm.filter_groups.max_num_gen_batches":
              "batch.max_refills", "data.gen_batch_size": "batch.oversampling"}, _filtering,
             "0 refills without filter_groups; gen_batch_size / train_batch_size: oversampling"),
    length("trainer.total_training_steps", "trainer.total_epochs"),
    same("data.seed", "run.seed"),
    together({"data.max_response_length": "sampling.max_new_tokens", f"{_R}.response_length": "sampling.max_new_tokens"},
             lambda r: {"sampling.max_new_tokens": _longest(r) or None}, "the same; the rollout's own key counts over the data's"),
    whole("data.max_prompt_length", "environment.budget.prompt_tokens", "the same; prompts that are longer are left out"),
    number(f"{_R}.temperature", "sampling.temperature"),
    number(f"{_R}.top_p", "sampling.top_p"),
    whole(f"{_R}.top_k", "sampling.top_k"),
    together({"algorithm.adv_estimator": ("algorithm.advantage", "algorithm.multi_reward"),
              "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage"}, _advantage,
             "grpo: grpo, without norm_adv_by_std_in_grpo: dr_grpo; rloo; gae; reinforce_plus_plus: reinforce_pp; gdpo: grpo "
             "with gdpo"),
    together({f"{_A}.policy_loss.loss_mode": "algorithm.loss", f"{_A}.clip_ratio": ("algorithm.clip_low", "algorithm.clip_high"),
              f"{_A}.clip_ratio_low": "algorithm.clip_low", f"{_A}.clip_ratio_high": "algorithm.clip_high",
              f"{_A}.clip_ratio_c": "algorithm.dual_clip_bound"}, _loss,
             "vanilla: dual_clip with clip_ratio_c, as verl's; gspo; cispo; dppo_tv: dppo; clip_ratio counts where "
             "clip_ratio_low or clip_ratio_high is null"),
    together({f"{_A}.loss_agg_mode": "algorithm.aggregation", f"{_A}.loss_scale_factor": "algorithm.aggregation"}, _aggregation,
             "token-mean: token; seq-mean-token-mean: sequence; seq-mean-token-sum-norm: constant"),
    together({f"{_A}.use_kl_loss": "algorithm.kl_in", f"{_A}.kl_loss_coef": "algorithm.kl_coef",
              f"{_A}.kl_loss_type": "algorithm.kl_estimator", "algorithm.use_kl_in_reward": "algorithm.kl_in",
              "algorithm.kl_penalty": "algorithm.kl_estimator", "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef"}, _kl,
             "0 unless use_kl_loss or use_kl_in_reward; low_var_kl: k3; kl: k1; mse, and k1+ or k3+ in the loss: k2"),
    number(f"{_A}.entropy_coeff", "algorithm.entropy_coef"),
    together({"algorithm.rollout_correction.rollout_is": "algorithm.correction",
              "algorithm.rollout_correction.rollout_is_threshold": ("algorithm.correction_cap", "algorithm.correction_window"),
              "algorithm.rollout_correction.bypass_mode": "algorithm.correction",
              "algorithm.rollout_correction.loss_type": "algorithm.correction",
              f"{_A}.tis_imp_ratio_cap": "algorithm.correction_cap"}, _correction, "an upper bound: tis; two bounds: mask"),
    together({f"{table}.*": "algorithm.overlong_buffer" for table in _BUFFERS}, _overlong, "its length, if it is enabled"),
    *_rows_of_optimizer(f"{_A}.optim"),
    number(f"{_A}.grad_clip", "optimizer.max_grad_norm"),
    critic("algorithm.adv_estimator", "critic.optim.lr", "critic.model.path", "algorithm.gamma", "algorithm.lam",
        "critic.cliprange_value", "trainer.critic_warmup"),
    together({"data.train_files": "environment.task_pool.path", "data.prompt_key": "environment.task_pool.problem_field",
              "data.train_max_samples": "environment.task_pool.max_examples"}, _data,
             "the files; the answer is in reward_model.ground_truth"),
    together(dict.fromkeys(("reward.custom_reward_function.path", "reward.custom_reward_function.name",
        "reward.reward_model.enable", "reward.reward_model.model_path"), "environment.rewards"), _rewards,
             "reward code is replaced by a task to be checked; a reward model goes into [[rewards]]"),
    together({"trainer.test_freq": "eval.0.every_steps", "data.val_files": "eval.0.environment",
              "data.val_max_samples": "eval.0.environment", f"{_R}.val_kwargs.n": "eval.0.samples",
              f"{_R}.val_kwargs.temperature": "eval.0.temperature", f"{_R}.val_kwargs.do_sample": "eval.0.temperature"},
             _evaluation, "[[eval]] on the validation files; -1: no evaluation; greedy unless do_sample"),
    together({f"{_R}.multi_turn.enable": "environment.budget.turns", f"{_R}.multi_turn.max_assistant_turns":
              "environment.budget.turns", f"{_R}.multi_turn.max_turns": "environment.budget.turns",
              f"{_R}.multi_turn.tool_config_path": "environment.tools.use"}, _turns,
             "the turns; tools have to be written as functions"),
    template("data.apply_chat_template_kwargs"),
    together({f"{_R}.name": "engine.kind", "trainer.n_gpus_per_node": "placement.learner_gpus",
              "trainer.nnodes": "placement.learner_gpus", f"{_R}.tensor_model_parallel_size": "placement.tensor_parallel",
              f"{_R}.gpu_memory_utilization": "placement.memory_share", f"{_R}.max_num_seqs": "engine.max_sequences",
              f"{_R}.nnodes": "placement.engines", f"{_R}.n_gpus_per_node": "placement.engines",
              "rollout.nnodes": "placement.engines", "rollout.n_gpus_per_node": "placement.engines"}, _placement,
             "GPUs / tensor_model_parallel_size engines on the GPUs that train; on their own where the rollout has nodes"),
    together({"async_training.staleness_threshold": "async.max_staleness", "async_training.partial_rollout": "async.in_flight"},
             _asynchrony, "the threshold, rounded up to versions"),
    whole("trainer.save_freq", "checkpoint.every_steps", "the same; -1, only at the end, leaves nmoe's default"),
    whole("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", "the same; without it verl keeps all, nmoe its default"),
    _RUN,
    sinks("trainer.logger", "trainer.project_name"),
    _RESUME,
    # Without counterpart.
    without("one KL coefficient for the whole run", "algorithm.kl_ctrl.type", neutral="fixed"),
    without("one KL coefficient for the whole run", "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
    without("gradients are clipped by actor.grad_clip", f"{_A}.optim.clip_grad"),
    without("groups are filtered by their rewards", "algorithm.filter_groups.metric",
        "algorithm.filter_groups.max_inflight_gen_batches"),
    without("nmoe rejects no samples beside algorithm.correction", "algorithm.rollout_correction.rollout_rs", neutral=None),
    without("nmoe rejects no samples beside algorithm.correction", "algorithm.rollout_correction.rollout_rs_threshold",
            "algorithm.rollout_correction.rollout_is_batch_normalize"),
    without("nmoe weighs no samples by their rewards", "algorithm.use_pf_ppo", neutral=False),
    without("nmoe weighs no samples by their rewards", "algorithm.pf_ppo.*"),
    without("settings of losses that nmoe does not have", f"{_A}.policy_loss.*", f"{_A}.tau_pos", f"{_A}.tau_neg"),
    without("a step's groups keep their order", f"{_A}.shuffle", f"{_A}.data_loader_seed"),
    without("every probability of a run is computed by the same ranks in batch.tokens_per_microbatch", f"{_R}.log_prob_*",
        "actor_rollout_ref.ref.log_prob_*",
            "critic.forward_*", "critic.ppo_*", "critic.use_dynamic_bsz"),
    without("nmoe shards weights over all ranks, and divides no layer or sequence; the numbers are the same", f"{_A}.strategy",
        f"{_A}.fsdp_config.*",
            f"{_A}.ulysses_sequence_parallel_size", f"{_A}.megatron.*", "actor_rollout_ref.ref.*", "critic.strategy",
            "critic.fsdp.*", "critic.megatron.*",
            "critic.model.fsdp_config.*", f"{_A}.use_torch_compile", f"{_A}.entropy_*", f"{_A}.pad_to_length*",
            f"{_A}.use_remove_padding",
            "critic.ulysses_sequence_parallel_size", f"{_A}.checkpoint.*", "critic.checkpoint.*", f"{_A}.use_dynamic_mbsz",
            "model_engine",
            "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout", f"{_A}.calculate_*",
            f"{_A}.use_prefix_grouper", f"{_A}.rollout_n",
            f"{_A}.freeze_vision_tower", f"{_A}.use_fused_kernels", f"{_A}.profiler.*", f"{_A}._target_",
            f"{_A}.router_replay.*", f"{_A}.veomni.*"),
    without("weights trained with quantisation: model.expert_profile, for experts alone", f"{_A}.qat.*", f"{_R}.qat",
        f"{_R}.quantization*"),
    without("nmoe chooses its own kernels of attention and of the loss", f"{_M}.use_remove_padding", f"{_M}.use_liger",
        f"{_M}.use_fused_kernels",
            f"{_M}.fused_kernel_options.*", f"{_M}.tiled_mlp.*", f"{_M}.enable_activation_offload"),
    without("nmoe executes no code that comes with a checkpoint, and reads its config.json", f"{_M}.trust_remote_code",
        "data.trust_remote_code",
            f"{_M}.external_lib", f"{_M}.hf_config_path", f"{_M}.override_config", f"{_M}.override_config.*", f"{_M}.use_shm",
            f"{_M}.custom_chat_template",
            f"{_M}.exclude_modules", f"{_M}.lora.*", f"{_M}.mtp.*", f"{_M}._target_", "critic.model.*"),
    without("an option of the engine's own; engine.args passes options of its command line on", f"{_R}.enforce_eager",
        f"{_R}.free_cache_engine",
            f"{_R}.enable_chunked_prefill", f"{_R}.enable_prefix_caching", f"{_R}.max_num_batched_tokens",
            f"{_R}.max_model_len", f"{_R}.dtype",
            f"{_R}.load_format", f"{_R}.layered_summon", f"{_R}.engine_kwargs.*", f"{_R}.disable_log_stats",
            f"{_R}.mtp*", f"{_R}.moe_*",
            f"{_R}.cudagraph_capture_sizes",
            f"{_R}.data_parallel_size", f"{_R}.expert_parallel_size", f"{_R}.pipeline_model_parallel_size",
            f"{_R}.scheduling_policy", f"{_R}.logprobs_mode",
            f"{_R}.multi_stage_wake_up", f"{_R}.enable_rollout_routing_replay", f"{_R}.prometheus.*",
            f"{_R}.router_config_path", f"{_R}.disaggregation.*",
            f"{_R}.checkpoint_engine.*", f"{_R}.swap_space", f"{_R}.limit_images", f"{_R}.skip_tokenizer_init",
            f"{_R}.update_weights_bucket_megabytes"),
    without("nmoe samples from the policy, to the end of a turn", f"{_R}.do_sample", neutral=True),
    without("nmoe samples from the policy, to the end of a turn", f"{_R}.ignore_eos", neutral=False),
    without("each rollout is one sample of the policy, and nmoe keeps all", f"{_R}.over_sample_rate", neutral=0),
    without("nmoe's rollouts are asynchronous, and each sample has its own seed", f"{_R}.mode", f"{_R}.seed",
        f"{_R}.full_determinism", f"{_R}.agent.*",
            f"{_R}.trace.*", f"{_R}.calculate_log_probs", f"{_R}.skip_*", f"{_R}.profiler.*", f"{_R}._target_",
            f"{_R}.prompt_length"),
    without("nmoe's own limits of a tool's output and of turns are in [environment.budget]", f"{_R}.multi_turn.*"),
    without("nmoe's evaluations sample from the whole distribution", f"{_R}.val_kwargs.top_k", neutral=-1),
    without("nmoe's evaluations sample from the whole distribution", f"{_R}.val_kwargs.top_p", neutral=1.0),
    without("records longer than environment.budget.prompt_tokens are left out, and none is cut",
        "data.filter_overlong_prompts",
            "data.filter_overlong_prompts_workers", "data.truncation"),
    without("a run reads its data in its own process, in an order drawn from its seed", "data.shuffle",
        "data.dataloader_num_workers", "data.validation_shuffle",
            "data.use_shm", "data.return_*", "data.tokenizer", "data.val_batch_size", "data.cache_dir",
            "data.need_tools_kwargs", "data.sampler.*",
            "data.filter_*", "data.chat_template", "data.tool_config_path", "data.function_tool_path", "data.max_model_len",
            "data.system_prompt"),
    without("the task grades every record; a mixture of pools has a task each", "data.reward_fn_key"),
    without("write a pool or a task of your own (docs/guides/environments.md)", "data.custom_cls.*", "data.datagen.*"),
    without("nmoe trains on text", "data.image_*", "data.video_key", "data.audio_key", "data.mm_*", "data.image_patch_size"),
    without("rewards run in the processes of the environment", "reward.num_workers", "reward.reward_manager.*",
        "reward_model.reward_manager", "reward.reward_model.*",
            "reward_model.*", "reward.reward_kwargs.*", "sandbox_fusion.*", "reward.sandbox_fusion.*",
            "custom_reward_function.reward_kwargs.*",
            "reward.custom_reward_function.reward_kwargs.*", "reward.launch_reward_fn_async"),
    without("the critic has the settings of [optimizer], and its own learning rate", "critic.optim.*", "critic.grad_clip",
        "critic.loss_agg_mode",
            "critic.loss_scale_factor", "critic.shuffle", "critic.data_loader_seed", "critic.enable", "critic.rollout_n",
            "critic.profiler.*", "critic._target_"),
    without("the newest checkpoints hold policy and critic", "trainer.max_critic_ckpt_to_keep",
        "trainer.del_local_ckpt_after_load",
            "trainer.default_hdfs_dir", "trainer.resume_from_path", "trainer.esi_redundant_time",
            "trainer.checkpoint_callback_class"),
    without("nmoe evaluates before the first step, and shows samples (run.show_sample_every)", "trainer.val_before_train",
        "trainer.val_only",
            "trainer.log_val_generations", "trainer.validation_data_dir", "trainer.rollout_data_dir"),
    without("ranks get about the same number of tokens", "trainer.balance_batch"),
    without("processes are started by [placement]", "ray_kwargs.*", "ray_init.*", "trainer.ray_wait_register_center_timeout",
        "trainer.device", "trainer.use_v1",
            "trainer.v1.*", "trainer.use_legacy_worker_impl", "trainer.npu_profile.*", "trainer.profile_steps",
            "global_profiler.*", "transfer_queue.*", "skip.*",
            "trainer.worker_nsight_options.*", "trainer.controller_nsight_options.*", "rollout.*", "async_training.*",
            "actor_rollout_ref.rollout.rollout_*"),
    without("a teacher is [distillation] in nmoe: write distillation.teacher", "distillation.enabled", neutral=False),
    without("a teacher is [distillation] in nmoe: write distillation.teacher", "distillation.*"),
    without("the configuration that the keys are laid over; verl's own has the defaults of this table", "config-path",
        "config-name", "config_path", "config_name",
            "defaults", "hydra.*"),
)  # fmt: skip


def _tokens(reading: Reading) -> Converted:
    count, longest = reading.whole("data.train_batch_size", 256), reading.whole("data.max_length", 1024)
    if not reading.yes("data.use_dynamic_bsz"):
        return examples(reading, count, longest, reading.whole("data.micro_batch_size_per_gpu", 4), 1)
    at_once = reading.whole("data.max_token_len_per_gpu", 8192)
    return {**examples(reading, count, longest, 1, 1), "batch.tokens_per_microbatch": at_once}


def _held_out(reading: Reading) -> Converted:
    every, files = reading.whole("trainer.test_freq", -1), reading["data.val_files"]
    if every <= 0 or not files:
        return {}
    return {
        "eval.0.every_steps": every,
        "records.held_out_path": at_home(files[0] if isinstance(files, list) else files),
    }


_SFT_ROWS: tuple[Row, ...] = (
    model("model.path"),
    together({"engine.dtype": "model.precision"},
             lambda r: {"model.precision": nearest(r, "engine.dtype", PRECISIONS, "bfloat16") if r.has("engine.dtype") else
                        "bfloat16"}, "bfloat16 by default, with master weights in float32"),
    switch("model.enable_gradient_checkpointing", "model.checkpoint_activations"),
    lora("model.lora_rank", "model.lora_alpha", "model.target_modules"),
    together({"data.train_batch_size": "records.tokens_per_step", "data.micro_batch_size_per_gpu": "batch.tokens_per_microbatch",
              "data.max_length": ("records.tokens_per_step", "batch.tokens_per_microbatch"),
              "data.max_token_len_per_gpu": "batch.tokens_per_microbatch", "data.use_dynamic_bsz": "batch.tokens_per_microbatch"},
             _tokens, "sequences times their longest length, as nmoe counts tokens"),
    length("trainer.total_training_steps", "trainer.total_epochs", "records.epochs"),
    same("trainer.seed", "run.seed"),
    *_rows_of_optimizer("optim"),
    number("optim.clip_grad", "optimizer.max_grad_norm"),
    together({"data.train_files": "records.path", "data.train_max_samples": "records.path"},
             lambda r: records(r, "data.train_files", limit="data.train_max_samples"), "the files"),
    columns(messages="data.messages_key", tools="data.tools_key", prompt="data.prompt_key", completion="data.response_key"),
    together({"trainer.test_freq": "eval.0.every_steps", "data.val_files": "records.held_out_path"}, _held_out,
        "-1: no evaluation"),
    whole("trainer.save_freq", "checkpoint.every_steps", "the same; -1, only at the end, leaves nmoe's default"),
    whole("trainer.max_ckpt_to_keep", "checkpoint.keep", "the same; without it verl keeps all, nmoe its default"),
    _RUN,
    sinks("trainer.logger", "trainer.project_name"),
    _RESUME,
    without("sequences that are longer are left out and counted; none is cut", "data.truncation", "data.pad_mode"),
    without("a run reads its data in its own process", "data.*"),
    without("nmoe shards weights over all ranks; the numbers are the same", "engine", "engine.*", "model.*",
        "use_remove_padding", "ulysses_sequence_parallel_size",
            "checkpoint.*", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device", "trainer.balance_batch",
            "trainer.default_hdfs_dir",
            "trainer.resume_from_path", "trainer.profile_interval", "profiler.*", "trainer.total_steps", "model", "optim",
            "trainer.checkpoint.*"),
    without("the configuration that the keys are laid over", "config-path", "config-name", "config_path", "config_name",
        "defaults", "hydra.*"),
)  # fmt: skip

_ALIASES = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "reward_model.enable": "reward.reward_model.enable", "reward_model.model.path": "reward.reward_model.model_path",
}  # fmt: skip

PPO = Program(
    trainer="verl", name="verl ppo", command="rl train", source="verl 0.9.1, verl/trainer/config", rows=_PPO_ROWS,
        aliases=_ALIASES,
    modules=("verl.trainer.main_ppo", "main_ppo", "main_dapo", "recipe.dapo", "verl.experimental.fully_async_policy",
    "one_step_off_policy"),
    defaults={
        f"{_M}.path": "~/models/deepseek-llm-7b-chat", f"{_M}.enable_gradient_checkpointing": True,
            f"{_A}.fsdp_config.dtype": "bfloat16",
        f"{_M}.lora_rank": 0, f"{_M}.lora_alpha": 16, f"{_M}.target_modules": "all-linear", f"{_M}.lora.alpha": 32,
        "data.train_batch_size": 1024, f"{_R}.n": 1, f"{_A}.ppo_mini_batch_size": 256, f"{_A}.ppo_epochs": 1,
        f"{_A}.use_dynamic_bsz": False,
        f"{_A}.ppo_max_token_len_per_gpu": 16384, "algorithm.filter_groups.enable": False,
        "algorithm.filter_groups.max_num_gen_batches": 0,
        "trainer.total_epochs": 30, "data.max_prompt_length": 512, "data.max_response_length": 512, f"{_R}.temperature": 1.0,
        f"{_R}.top_p": 1,
        f"{_R}.top_k": -1, "algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": True,
        f"{_A}.policy_loss.loss_mode": "vanilla",
        f"{_A}.clip_ratio": 0.2, f"{_A}.clip_ratio_low": 0.2, f"{_A}.clip_ratio_high": 0.2, f"{_A}.clip_ratio_c": 3.0,
        f"{_A}.loss_agg_mode": "token-mean", f"{_A}.use_kl_loss": False, f"{_A}.kl_loss_coef": 0.001,
        f"{_A}.kl_loss_type": "low_var_kl",
        "algorithm.use_kl_in_reward": False, "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.kl_ctrl.type": "fixed",
        f"{_A}.entropy_coeff": 0, "algorithm.rollout_correction.rollout_is_threshold": 2.0, "critic.optim.lr": 1e-5,
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0, "critic.cliprange_value": 0.5, "trainer.critic_warmup": 0, f"{_A}.optim.lr": 1e-6,
        f"{_A}.optim.lr_scheduler_type": "constant", f"{_A}.optim.lr_warmup_steps": -1,
        f"{_A}.optim.lr_warmup_steps_ratio": 0.0,
        f"{_A}.optim.min_lr_ratio": 0.0, f"{_A}.optim.betas": [0.9, 0.999], f"{_A}.optim.weight_decay": 0.01,
        f"{_A}.grad_clip": 1.0,
        f"{_A}.optim.optimizer": "AdamW", "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
        "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
        "data.prompt_key": "prompt", "data.train_max_samples": -1, "data.val_max_samples": -1, "trainer.test_freq": -1,
        f"{_R}.val_kwargs.n": 1,
        f"{_R}.val_kwargs.temperature": 0, f"{_R}.val_kwargs.do_sample": False, f"{_R}.multi_turn.enable": False,
        "trainer.n_gpus_per_node": 8,
        "trainer.nnodes": 1, f"{_R}.tensor_model_parallel_size": 2, f"{_R}.gpu_memory_utilization": 0.5,
        f"{_R}.max_num_seqs": 256,
        f"{_R}.nnodes": 0, "trainer.save_freq": -1, "trainer.experiment_name": "gsm8k", "trainer.project_name": "verl_examples",
        "trainer.logger": ["console", "wandb"], "trainer.resume_mode": "auto", f"{_R}.do_sample": True,
        f"{_R}.ignore_eos": False,
        f"{_R}.over_sample_rate": 0, "algorithm.use_pf_ppo": False, "distillation.enabled": False,
            },
    always=(GROUPS_DROPPED.format(trainer="verl"),),
)  # fmt: skip

SFT = Program(
    trainer="verl", name="verl sft", command="sft", source="verl 0.9.1, verl/trainer/config/sft_trainer_engine.yaml",
        rows=_SFT_ROWS,
    modules=("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer", "sft_trainer"),
    aliases={"model.partial_pretrain": "model.path", "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio"},
    defaults={
        "model.path": "~/models/deepseek-llm-7b-chat", "model.enable_gradient_checkpointing": True, "model.lora_rank": 0,
        "model.lora_alpha": 16,
        "model.target_modules": "all-linear", "data.train_batch_size": 256, "data.micro_batch_size_per_gpu": 4,
        "data.max_length": 1024,
        "data.max_token_len_per_gpu": 8192, "data.use_dynamic_bsz": True, "trainer.total_epochs": 4, "trainer.seed": 1,
        "optim.lr": 1e-3,
        "optim.lr_scheduler_type": "constant", "optim.lr_warmup_steps": -1, "optim.lr_warmup_steps_ratio": 0.0,
        "optim.min_lr_ratio": 0.0,
        "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.01, "optim.clip_grad": 1.0, "optim.optimizer": "AdamW",
        "data.train_files": "~/data/gsm8k/train.parquet", "data.messages_key": "messages", "data.tools_key": "tools",
        "trainer.test_freq": -1,
        "trainer.save_freq": -1, "trainer.experiment_name": "test", "trainer.project_name": "gsm8k-sft",
        "trainer.logger": ["console", "wandb"],
        "trainer.resume_mode": "auto",
    },
)  # fmt: skip

PROGRAMS = (PPO, SFT)
