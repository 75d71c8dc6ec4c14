"""SkyRL: `skyrl.train.entrypoints.main_base`, `skyrl_train.entrypoints.main_base`, and examples' programs with the same keys.

Keys are spelled as in skyrl 0.4.0 (`skyrl/train/config/config.py`); skyrl-train 0.3.1 had the aliases
(`skyrl_train/config/ppo_base_config.yaml`). Batches are counted in prompts. `trainer.policy.nmoe_config` is of nmoe's integration.
"""

from __future__ import annotations

from typing import Any

from nmoe.config.launches.concepts import (
    betas,
    critic,
    length,
    lora,
    model,
    offload,
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
    at_home,
    colocated,
    end_of_schedule,
    grader,
    kl,
    name_of,
    nearest,
    pool,
    probe,
    truncated_in_mean,
    uncorrected,
    updates,
    warmup_of_run,
    words,
)

_ALGORITHM, _ENGINE, _POLICY = "trainer.algorithm", "generator.inference_engine", "trainer.policy"
_OPTIMIZER, _OFF = f"{_POLICY}.optimizer_config", f"{_ALGORITHM}.off_policy_correction"


def _is_old(reading: Reading) -> bool:
    """Whether the launch is written for skyrl-train, by its program or its spelling."""
    return reading.module.startswith("skyrl_train") or any(
        one.key in reading.program.aliases for one in reading.given.values()
    )


def _batch(reading: Reading) -> Converted:
    prompts, group = (
        reading.whole("trainer.train_batch_size"),
        max(1, reading.whole("generator.n_samples_per_prompt", 5)),
    )
    steps = updates(
        reading,
        prompts * group,
        reading.number("trainer.policy_mini_batch_size") * group,
        prompts,
        "policy_mini_batch_size",
    )
    return {"batch.prompts_per_step": prompts, "batch.group_size": group, "batch.updates_per_step": steps}


def _microbatch(reading: Reading) -> Converted:
    if (tokens := reading.whole("trainer.max_tokens_per_microbatch", -1)) > 0:
        return {"batch.tokens_per_microbatch": tokens}
    longest = reading.whole("trainer.max_prompt_length") + reading.whole(
        "generator.sampling_params.max_generate_length"
    )
    return {"batch.tokens_per_microbatch": max(1, reading.whole("trainer.micro_train_batch_size_per_gpu", 1)) * longest}


def _updates(reading: Reading) -> int:
    """Returns the optimizer steps of a step of the run."""
    passes = max(1, reading.whole("trainer.update_epochs_per_batch", 1))
    return max(1, int(_batch(reading)["batch.updates_per_step"])) * passes


def _schedule(reading: Reading) -> Converted:
    """SkyRL counts the warm-up in steps of the optimizer."""
    kind = str(reading[f"{_OPTIMIZER}.scheduler"])
    found: dict[str, Any] = {"optimizer.min_lr_ratio": end_of_schedule(reading, kind)}
    if kind == "constant" or (steps := reading.whole(f"{_OPTIMIZER}.num_warmup_steps")) <= 0:
        return found
    return {**found, "optimizer.warmup_steps": warmup_of_run(reading, steps, _updates(reading))}


def _advantage(reading: Reading) -> Converted:
    name = str(reading[f"{_ALGORITHM}.advantage_estimator"]).lower()
    if reading.yes(f"{_ALGORITHM}.advantage_batch_normalize"):
        reading.differs("advantage_batch_normalize: nmoe normalises over the batch in reinforce_pp and gae alone")
    if name == "grpo" and not reading.yes(f"{_ALGORITHM}.grpo_norm_by_std"):
        return {"algorithm.advantage": "dr_grpo"}
    if name == "reinforce++" and reading.number(f"{_ALGORITHM}.gamma", 1) != 1:
        reading.differs(f"gamma = {reading[f'{_ALGORITHM}.gamma']}: nmoe's reinforce_pp does not discount")
    return {"algorithm.advantage": nearest(reading, f"{_ALGORITHM}.advantage_estimator", ADVANTAGES, "grpo")}


def _loss(reading: Reading) -> Converted:
    kind = str(reading[f"{_ALGORITHM}.policy_loss_type"])
    if kind == "cispo":
        low = reading.number(f"{_ALGORITHM}.cispo.cispo_eps_clip_low", 0.0 if _is_old(reading) else 1.0)
        high = reading.number(f"{_ALGORITHM}.cispo.cispo_eps_clip_high", 5.0 if _is_old(reading) else 4.0)
        if low < 1:
            reading.differs(
                f"cispo_eps_clip_low = {low:g}: the ratio is also held above {1 - low:g}; nmoe's cispo is not"
            )
        if reading[f"{_ALGORITHM}.cispo.cispo_anchor"] not in (None, "old"):
            reading.differs(
                "cispo_anchor: nmoe's ratio is to the learner before several updates of a step, else to the engine"
            )
        return {"algorithm.loss": "cispo", "algorithm.clip_high": float(high)}
    if kind == "dppo":
        if reading[f"{_ALGORITHM}.dppo.dppo_type"] not in (None, "binary_tv"):
            reading.differs(
                f"dppo_type = {reading[f'{_ALGORITHM}.dppo.dppo_type']}: nmoe's dppo bounds the total variation"
            )
        reading.differs("nmoe's dppo also pulls the policy back to the engine's probabilities, by 0.001")
        return {
            "algorithm.loss": "dppo", "algorithm.clip_low": float(reading[f"{_ALGORITHM}.dppo.delta_low"]),
            "algorithm.clip_high": float(reading[f"{_ALGORITHM}.dppo.delta_high"]),
        }  # fmt: skip
    found: dict[str, Any] = {
        "algorithm.clip_low": float(reading[f"{_ALGORITHM}.eps_clip_low"]),
        "algorithm.clip_high": float(reading[f"{_ALGORITHM}.eps_clip_high"]),
    }  # fmt: skip
    if kind == "dual_clip":
        bound = float(reading[f"{_ALGORITHM}.clip_ratio_c"])
        return {**found, "algorithm.loss": "dual_clip", "algorithm.dual_clip_bound": bound}
    losses = {"regular": "clip", "gspo": "gspo"}
    return {**found, "algorithm.loss": nearest(reading, f"{_ALGORITHM}.policy_loss_type", losses, "clip")}


def _aggregation(reading: Reading) -> Converted:
    mode = str(reading[f"{_ALGORITHM}.loss_reduction"])
    found = nearest(reading, f"{_ALGORITHM}.loss_reduction", words("algorithm.aggregation"), "token")
    if str(reading[f"{_ALGORITHM}.policy_loss_type"]) == "gspo" and mode != "sequence_mean":
        reading.differs(f"gspo with {mode}: nmoe's gspo takes the mean of sequences")
        found = "sequence"
    elif mode == "token_mean_legacy" or (mode == "token_mean" and _is_old(reading)):
        reading.differs(
            "this token_mean is of each micro-batch, and then of micro-batches; nmoe's is over all tokens of an update"
        )
    longest = reading["generator.sampling_params.max_generate_length"]
    if found == "constant" and (scale := reading[f"{_ALGORITHM}.max_seq_len"]) != longest:
        reading.differs(f"max_seq_len = {scale}: nmoe divides sums over tokens by sampling.max_new_tokens = {longest}")
    if reading.yes("generator.apply_overlong_filtering"):
        truncated_in_mean(reading, found)
    return {"algorithm.aggregation": found}


def _kl(reading: Reading) -> Converted:
    in_loss, in_reward = reading.yes(f"{_ALGORITHM}.use_kl_loss"), reading.yes(f"{_ALGORITHM}.use_kl_in_reward")
    if in_loss and in_reward:
        reading.differs("KL in the loss and in the reward, which SkyRL refuses; the loss is written")
    if not in_loss and not in_reward:
        return {"algorithm.kl_coef": 0.0}
    if not (coef := reading[f"{_ALGORITHM}.kl_loss_coef"]):
        return {"algorithm.kl_coef": 0.0}
    if in_loss:
        _of_each_sequence(reading, "the KL term")
    estimator = nearest(reading, f"{_ALGORITHM}.kl_estimator_type", DIVERGENCES, "k1")
    return kl(coef, "loss" if in_loss else "reward", estimator)


def _entropy(reading: Reading) -> Converted:
    if not reading.yes(f"{_ALGORITHM}.use_entropy_loss"):
        return {"algorithm.entropy_coef": 0.0}
    _of_each_sequence(reading, "the entropy")
    return {"algorithm.entropy_coef": float(reading[f"{_ALGORITHM}.entropy_loss_coef"])}


def _of_each_sequence(reading: Reading, what: str) -> None:
    """Remarks that SkyRL averages a term apart from the loss (`workers/worker.py`, `forward_backward`)."""
    if reading[f"{_ALGORITHM}.loss_reduction"] != "sequence_mean":
        reading.differs(
            f"{what} is averaged in each micro-batch, without regard to loss_reduction; nmoe's is weighed as the loss is"
        )


def _correction(reading: Reading) -> Converted:
    metric = reading[f"{_OFF}.sequence_mask_metric"]
    if str(reading[f"{_ALGORITHM}.policy_loss_type"]) == "dppo":
        return {"algorithm.correction": "none"}
    if metric is not None:
        if str(metric) != "geometric":
            reading.differs(
                f"sequence_mask_metric = {metric}: nmoe's window is of the geometric mean; its default is written"
            )
            return {"algorithm.correction": "sequence_mask"}
        window = [float(reading[f"{_OFF}.geo_mask_low"]), float(reading[f"{_OFF}.geo_mask_high"])]
        found: dict[str, Any] = {"algorithm.correction": "sequence_mask", "algorithm.correction_window": window}
        kind = reading[f"{_OFF}.tis_ratio_type"]
        if kind == "token":
            return {**found, "algorithm.correction_cap": float(reading[f"{_OFF}.token_tis_ratio_clip_high"])}
        reading.differs(
            f"sequence_mask_metric with tis_ratio_type = {kind}: nmoe weighs the tokens of the other sequences by their own ratio, "
            f"up to algorithm.correction_cap"
        )
        return found
    if reading.yes(f"{_ALGORITHM}.use_tis"):
        kind, key = "token", f"{_ALGORITHM}.tis_imp_ratio_cap"
    else:
        names = {"none": "none", "token": "token", "sequence": "sequence"}
        kind = nearest(reading, f"{_OFF}.tis_ratio_type", names, "token")
        key = f"{_OFF}.{'sequence' if kind == 'sequence' else 'token'}_tis_ratio_clip_high"
    if kind == "none":
        return uncorrected(reading, _updates(reading), True)
    if kind == "sequence":
        reading.differs(
            "tis_ratio_type = sequence weighs by the product of a sequence's ratios; nmoe's tis weighs each token"
        )
    if (cap := reading.number(key)) < 1:
        reading.differs(f"{key} = {cap:g}: a cap below 1 is none of nmoe's; 1 is written")
    return {"algorithm.correction": "tis", "algorithm.correction_cap": max(1.0, float(cap))}


def _filtering(reading: Reading) -> Converted:
    if reading[f"{_ALGORITHM}.dynamic_sampling.type"] is None:
        return {"batch.max_refills": 0}
    kinds = {"filter": "filter", "replace": "replace"}
    if nearest(reading, f"{_ALGORITHM}.dynamic_sampling.type", kinds, "filter") == "replace":
        reading.differs("dynamic_sampling replaces groups without a signal by copies of others; nmoe samples new ones")
        return {"batch.max_refills": 1}
    most = reading.whole(f"{_ALGORITHM}.dynamic_sampling.max_sample_batches", 30)
    if most <= 0:
        reading.differs(
            "dynamic_sampling without a bound samples until the batch is full; nmoe refills at most 100 times"
        )
    return {"batch.max_refills": most - 1 if most > 0 else 100}


def _lora(reading: Reading) -> Converted:
    found = _ADAPTERS.converted(reading)
    if found and (start := reading[f"{_POLICY}.model.lora.init_method"]) not in (None, "kaiming"):
        reading.differs(f"lora.init_method = {start}: nmoe's adapters start as PEFT's do, at no change")
    return found


_ADAPTERS = lora(*(f"{_POLICY}.model.lora.{key}" for key in ("rank", "alpha", "target_modules")))


def _placement(reading: Reading) -> Converted:
    backend = nearest(reading, f"{_ENGINE}.backend", {"vllm": "vllm", "sglang": "sglang"}, "vllm")
    if not reading.yes(f"{_ENGINE}.run_engines_locally"):
        given = reading[f"{_ENGINE}.external_server_urls"] or ["127.0.0.1:8001"]
        urls = [
            one if str(one).startswith("http") else f"http://{one}"
            for one in (given if isinstance(given, list) else [given])
        ]
        reading.fill(
            "engine.urls",
            "servers started with nmoe's plugin for vLLM (docs/guides/engines.md); SkyRL's have another protocol",
        )
        return {"engine.kind": backend, "engine.urls": urls}
    default = 4 if _is_old(reading) else 1
    parallel = reading.whole(f"{_ENGINE}.tensor_parallel_size") or default
    nodes = max(1, reading.whole("trainer.placement.policy_num_nodes", 1))
    found: dict[str, Any] = {
        "engine.kind": backend,
        "engine.max_sequences": reading.whole(f"{_ENGINE}.max_num_seqs", 1024),
        "placement.engines": max(1, reading.whole(f"{_ENGINE}.num_engines", 1)),
        "placement.learner_gpus": nodes * (reading.whole("trainer.placement.policy_num_gpus_per_node") or default),
        "placement.tensor_parallel": parallel,
        "placement.memory_share": float(reading.number(f"{_ENGINE}.gpu_memory_utilization", 0.8)),
    }
    if not reading.yes("trainer.placement.colocate_all"):
        return {**found, "placement.launcher": "ray"} if nodes > 1 else found
    return {**found, **colocated(reading, nodes)}


def _staleness(reading: Reading) -> int:
    if reading.yes("trainer.fully_async.enabled") or reading.has("trainer.fully_async.max_staleness_steps"):
        return reading.whole("trainer.fully_async.max_staleness_steps", 4)
    return 0


def _asynchrony(reading: Reading) -> Converted:
    if not (staleness := _staleness(reading)):
        return {}
    in_flight = "recompute" if reading.yes("trainer.fully_async.clear_kv_cache_on_weight_sync") else "stale_kv"
    return {"async.max_staleness": staleness, "async.in_flight": in_flight}


_OF_SKYRL_GYM = ("aime", "gsm8k", "gsm8k_multi_turn", "gsm8k_llm_judge", "lcb", "search", "searchcode", "text2sql")


def _data(reading: Reading) -> Converted:
    name = str(reading["environment.env_class"])
    if not reading.has("data.train_data"):
        reading.fill(
            "environment.task_pool.path", "the problems; the launch names none, and SkyRL's default is written"
        )
    found = pool(reading, "environment.task_pool", "data.train_data")
    found["environment.env_id"] = name_of(name) or "skyrl"
    if name not in _OF_SKYRL_GYM:
        return {
            **found,
            **grader(
                reading,
                [
                    f"the environment {name}: write it as a live environment (docs/guides/environments.md#live-environments)"
                ],
            ),
        }
    if reading.has("environment.env_class"):
        reading.differs(
            f"env_class = {name} is for records that name none: nmoe reads env_class in each record, or of a subclass of "
            f"SkyrlGymEpisode "
            "(docs/ecosystem.md#skyrl-gym)"
        )
    return {**found, "environment.task": "skyrl_gym"}


def _evaluation(reading: Reading) -> Converted:
    every, files = reading.whole("trainer.eval_interval", 5), reading["data.val_data"]
    if every <= 0 or not files:
        return {}
    if not reading.has("data.val_data"):
        reading.fill(
            "eval.0.environment.task_pool.path", "the problems; the launch names none, and SkyRL's default is written"
        )
    reading.differs(EVALUATED.format(trainer="SkyRL"))
    name = str(reading["environment.env_class"])
    heat = reading.number("generator.eval_sampling_params.temperature")
    task = "skyrl_gym" if name in _OF_SKYRL_GYM else "math"
    if task == "math":
        reading.fill("eval.0.environment.task", "as environment.task")
    return {
        "eval.0.every_steps": every, **probe(heat, reading.whole("generator.eval_n_samples_per_prompt", 1)),
        "eval.0.max_tokens": reading.whole("generator.eval_sampling_params.max_generate_length") or None,
        "eval.0.environment.env_id": f"{name_of(name)}_validation", "eval.0.environment.task": task,
        **pool(reading, "eval.0.environment.task_pool", "data.val_data"),
    }  # fmt: skip


def _run(reading: Reading) -> Converted:
    path = at_home(reading["trainer.ckpt_path"]).rstrip("/") if reading.has("trainer.ckpt_path") else ""
    parent, _, last = path.rpartition("/")
    named = reading["trainer.run_name"]
    every = reading.whole("trainer.hf_save_interval", -1)
    export = reading["trainer.export_path"] if every > 0 else None
    if export and every != reading.whole("trainer.ckpt_interval"):
        reading.differs(f"hf_save_interval = {every}: nmoe exports with each of its checkpoints")
    return {
        "run.name": name_of(named) if reading.has("trainer.run_name") or not last else name_of(last),
        "run.directory": parent or None,
        "checkpoint.export_directory": at_home(export) if export else None,
    }  # fmt: skip


_ROWS: tuple[Row, ...] = (
    model(f"{_POLICY}.model.path"),
    together({"trainer.bf16": "model.precision"},
        lambda r: {"model.precision": "bfloat16" if r.yes("trainer.bf16") else "float32"}, "true: bfloat16"),
    switch("trainer.gradient_checkpointing", "model.checkpoint_activations"),
    offload(f"{_POLICY}.fsdp_config.cpu_offload"),
    same(f"{_POLICY}.nmoe_config.rdep.mode", "parallel.rdep"),
    same(f"{_POLICY}.nmoe_config.rdep.profile", "model.expert_profile"),
    number(f"{_POLICY}.nmoe_config.router_aux_loss_coef", "model.router_aux_loss_coef"),
    Row({**_ADAPTERS.keys, f"{_POLICY}.model.lora.init_method": ()}, _ADAPTERS.text, _lora),
    together({"trainer.train_batch_size": "batch.prompts_per_step", "generator.n_samples_per_prompt": "batch.group_size",
              "trainer.policy_mini_batch_size": "batch.updates_per_step"}, _batch,
             "counted in prompts; train_batch_size / policy_mini_batch_size updates"),
    whole("trainer.update_epochs_per_batch", "batch.passes_per_step"),
    together(dict.fromkeys(("trainer.micro_train_batch_size_per_gpu", "trainer.max_tokens_per_microbatch"),
        "batch.tokens_per_microbatch"), _microbatch, "sequences times the longest prompt and answer, or the tokens themselves"),
    together(dict.fromkeys((f"{_ALGORITHM}.dynamic_sampling.type", f"{_ALGORITHM}.dynamic_sampling.max_sample_batches"),
        "batch.max_refills"), _filtering, "filter: max_sample_batches - 1; null: 0"),
    length("trainer.max_training_steps", "trainer.epochs"),
    same("trainer.seed", "run.seed"),
    whole("generator.sampling_params.max_generate_length", "sampling.max_new_tokens"),
    whole("trainer.max_prompt_length", "environment.budget.prompt_tokens", "the same; prompts that are longer are left out"),
    whole("generator.max_turns", "environment.budget.turns"),
    number("generator.sampling_params.temperature", "sampling.temperature"),
    number("generator.sampling_params.top_p", "sampling.top_p"),
    whole("generator.sampling_params.top_k", "sampling.top_k"),
    together(dict.fromkeys((f"{_ALGORITHM}.advantage_estimator", f"{_ALGORITHM}.grpo_norm_by_std",
        f"{_ALGORITHM}.advantage_batch_normalize"), "algorithm.advantage"), _advantage,
             "grpo: grpo, without grpo_norm_by_std: dr_grpo; gae; rloo; reinforce++: reinforce_pp; maxrl"),
    together({f"{_ALGORITHM}.policy_loss_type": "algorithm.loss", f"{_ALGORITHM}.eps_clip_low": "algorithm.clip_low",
              f"{_ALGORITHM}.eps_clip_high": "algorithm.clip_high", f"{_ALGORITHM}.clip_ratio_c": "algorithm.dual_clip_bound",
              f"{_ALGORITHM}.cispo.cispo_eps_clip_low": "algorithm.clip_low",
              f"{_ALGORITHM}.cispo.cispo_eps_clip_high": "algorithm.clip_high", f"{_ALGORITHM}.cispo.cispo_anchor": (),
              f"{_ALGORITHM}.dppo.dppo_type": "algorithm.loss", f"{_ALGORITHM}.dppo.delta_low": "algorithm.clip_low",
              f"{_ALGORITHM}.dppo.delta_high": "algorithm.clip_high"}, _loss, "regular: clip; dual_clip; gspo; cispo; dppo"),
    together(dict.fromkeys((f"{_ALGORITHM}.loss_reduction", f"{_ALGORITHM}.max_seq_len"), "algorithm.aggregation"), _aggregation,
             "token_mean: token; sequence_mean: sequence; seq_mean_token_sum_norm: constant"),
    together({f"{_ALGORITHM}.use_kl_loss": "algorithm.kl_in", f"{_ALGORITHM}.use_kl_in_reward": "algorithm.kl_in",
              f"{_ALGORITHM}.kl_loss_coef": "algorithm.kl_coef", f"{_ALGORITHM}.kl_estimator_type": "algorithm.kl_estimator"}, _kl,
             "0 without use_kl_loss and use_kl_in_reward"),
    together(dict.fromkeys((f"{_ALGORITHM}.use_entropy_loss", f"{_ALGORITHM}.entropy_loss_coef"), "algorithm.entropy_coef"),
        _entropy, "0 without use_entropy_loss"),
    together({f"{_ALGORITHM}.use_tis": "algorithm.correction", f"{_ALGORITHM}.tis_imp_ratio_cap": "algorithm.correction_cap",
              f"{_OFF}.tis_ratio_type": "algorithm.correction", f"{_OFF}.token_tis_ratio_clip_high": "algorithm.correction_cap",
              f"{_OFF}.sequence_tis_ratio_clip_high": "algorithm.correction_cap",
              f"{_OFF}.sequence_mask_metric": "algorithm.correction", f"{_OFF}.geo_mask_low": "algorithm.correction_window",
              f"{_OFF}.geo_mask_high": "algorithm.correction_window"}, _correction,
             "token and sequence: tis; geometric masks: sequence_mask"),
    switch("generator.apply_overlong_filtering", "algorithm.mask_truncated"),
    number(f"{_OPTIMIZER}.lr", "optimizer.learning_rate"),
    critic(f"{_ALGORITHM}.advantage_estimator", "trainer.critic.optimizer_config.lr", "trainer.critic.model.path",
        f"{_ALGORITHM}.gamma", f"{_ALGORITHM}.lambd", f"{_ALGORITHM}.value_clip", None),
    together({f"{_OPTIMIZER}.scheduler": "optimizer.min_lr_ratio", f"{_OPTIMIZER}.num_warmup_steps": "optimizer.warmup_steps"},
             _schedule, "linear warm-up, then a half cosine to 0; constant schedules end at 1; a warm-up in optimizer steps"),
    betas(f"{_OPTIMIZER}.adam_betas"),
    number(f"{_OPTIMIZER}.weight_decay", "optimizer.weight_decay"),
    number(f"{_OPTIMIZER}.max_grad_norm", "optimizer.max_grad_norm"),
    together({"data.train_data": "environment.task_pool.path", "environment.env_class": "environment.task"}, _data,
             "environments of skyrl-gym: the task skyrl_gym; others have to be written"),
    together({"trainer.eval_interval": "eval.0.every_steps", "data.val_data": "eval.0.environment",
              "generator.eval_sampling_params.temperature": "eval.0.temperature",
              "generator.eval_n_samples_per_prompt": "eval.0.samples",
              "generator.eval_sampling_params.max_generate_length": "eval.0.max_tokens"}, _evaluation,
             "[[eval]] on the validation files; -1: no evaluation"),
    template("generator.chat_template_kwargs"),
    together({f"{_ENGINE}.backend": "engine.kind", f"{_ENGINE}.num_engines": "placement.engines",
              f"{_ENGINE}.tensor_parallel_size": "placement.tensor_parallel",
              f"{_ENGINE}.gpu_memory_utilization": "placement.memory_share", f"{_ENGINE}.max_num_seqs": "engine.max_sequences",
              f"{_ENGINE}.run_engines_locally": "engine.urls", f"{_ENGINE}.external_server_urls": "engine.urls",
              "trainer.placement.colocate_all": "placement.layout",
              "trainer.placement.policy_num_nodes": "placement.learner_gpus",
              "trainer.placement.policy_num_gpus_per_node": "placement.learner_gpus"}, _placement,
             "engines on the GPUs that train with colocate_all, else on their own"),
    together({"trainer.fully_async.enabled": "async.max_staleness", "trainer.fully_async.max_staleness_steps":
              "async.max_staleness", "trainer.fully_async.clear_kv_cache_on_weight_sync": "async.in_flight"}, _asynchrony,
             "the same, in steps"),
    whole("trainer.ckpt_interval", "checkpoint.every_steps"),
    whole("trainer.max_ckpts_to_keep", "checkpoint.keep", "the same; -1, all, leaves nmoe's default"),
    together({"trainer.run_name": "run.name", "trainer.ckpt_path": "run.directory",
              "trainer.export_path": "checkpoint.export_directory", "trainer.hf_save_interval": "checkpoint.export_directory"},
             _run, "exports are written with each checkpoint, if hf_save_interval is above 0"),
    sinks("trainer.logger", "trainer.project_name"),
    resume("trainer.resume_mode", ("latest",), "from_path", "latest: auto"),
    # Without counterpart.
    without("nmoe has one way of sharding: weights, gradients and optimizer over all ranks; the numbers are the same",
        "trainer.strategy",
            f"{_POLICY}.fsdp_config.*", f"{_POLICY}.deepspeed_config*", f"{_POLICY}.megatron_config.*", "trainer.ref.*",
            "trainer.sequence_parallel_backend",
            f"{_POLICY}.sequence_parallel_size", "trainer.critic.fsdp_config.*", "trainer.critic.deepspeed_config.*",
            "trainer.critic.megatron_config.*",
            "trainer.critic.sequence_parallel_size", "deepspeed_config.*", "trainer.use_expandable_segments",
            f"{_OPTIMIZER}.offload_after_step",
            f"{_POLICY}.use_torch_compile", f"{_POLICY}.record_memory", f"{_POLICY}.torch_profiler_config.*",
            "trainer.gradient_checkpointing_use_reentrant"),
    without("nmoe recognises a checkpoint's family by its config.json", f"{_POLICY}.model.type",
        f"{_POLICY}.model.trust_remote_code",
            f"{_POLICY}.model_config_kwargs", f"{_POLICY}.model_config_kwargs.*", "trainer.critic.model_config_kwargs",
            "trainer.critic.model_config_kwargs.*",
            "generator.model_name", f"{_POLICY}.language_model_only", f"{_POLICY}.inference_only_init"),
    without("other settings of nmoe as SkyRL's backend: nmoe has its own tables", f"{_POLICY}.nmoe_config.*"),
    without("nmoe's adapters have no dropout", f"{_POLICY}.model.lora.dropout", neutral=0),
    without("nmoe's adapters have no dropout", "trainer.critic.model.lora.*"),
    without("engine.weights says how adapters are published", f"{_POLICY}.model.lora.*", "trainer.target_modules",
        "trainer.exclude_modules"),
    without("weights trained with quantisation: model.expert_profile, for experts alone", f"{_POLICY}.model.fake_int4_qat.*"),
    without("one KL coefficient for the whole run", f"{_ALGORITHM}.kl_ctrl.type", neutral="fixed"),
    without("one KL coefficient for the whole run", f"{_ALGORITHM}.kl_ctrl.*"),
    without("use kl_estimator_type", f"{_ALGORITHM}.use_kl_estimator_k3", f"{_ALGORITHM}.use_abs_kl"),
    without("nmoe always leaves groups of equal rewards out", f"{_ALGORITHM}.zero_variance_filter",
        f"{_ALGORITHM}.zero_variance_filter_tol",
            f"{_ALGORITHM}.dynamic_sampling.min_replace_ratio"),
    without("settings of losses that nmoe does not have", f"{_ALGORITHM}.sapo.*", f"{_ALGORITHM}.clip_cov.*",
        f"{_ALGORITHM}.kl_cov.*",
            f"{_ALGORITHM}.cispo.*"),
    without("nmoe masks no single tokens beside algorithm.correction", f"{_OFF}.*"),
    without("temperatures are of sampling", f"{_ALGORITHM}.temperature", neutral=None),
    without("nmoe's value head has its own name", f"{_ALGORITHM}.value_head_prefix",
        f"{_ALGORITHM}.enable_sample_support_replay"),
    without("the reference stays the model that the run starts from; algorithm.reference_every_steps replaces it",
        "trainer.update_ref_every_epoch",
            neutral=False),
    without("nmoe does not take the reward of truncated answers away", "generator.zero_reward_on_non_stop", neutral=False),
    without("nmoe samples by temperature, top_p and top_k alone", "generator.sampling_params.min_p", neutral=0.0),
    without("nmoe samples by temperature, top_p and top_k alone", "generator.sampling_params.repetition_penalty", neutral=1.0),
    without("turns end at the end tokens of the model", "generator.sampling_params.stop", neutral=None),
    without("nmoe's evaluations sample from the whole distribution", "generator.eval_sampling_params.top_p", neutral=1.0),
    without("nmoe's evaluations sample from the whole distribution", "generator.eval_sampling_params.top_k", neutral=-1),
    without("turns end at the end tokens of the model", "generator.append_eos_token_after_stop_str_in_multi_turn",
        "generator.sampling_params.*",
            "generator.eval_sampling_params.*"),
    without("conversations are rendered by environment.format, and nothing is encoded again",
        "generator.use_conversation_multi_turn",
            "generator.chat_template.*", "generator.step_wise_trajectories", "generator.merge_stepwise_output",
            "generator.batched", "generator.async_engine",
            "generator.vision_language_generator", "generator.enable_thinking_tokens", "generator.custom_chat_template_key"),
    without("the model's context bounds all turns together", "generator.max_input_length"),
    without("an option of the engine's own; engine.args passes options of its command line on", f"{_ENGINE}.*", "generator.*"),
    without("rewards and environments run in nmoe's own processes", "environment.skyrl_gym.*", "environment.*"),
    without("nmoe groups the tokens of a forward pass by batch.tokens_per_microbatch",
        "trainer.micro_forward_batch_size_per_gpu",
            "trainer.remove_microbatch_padding", "trainer.use_sample_packing", "trainer.recompute_old_logprobs_per_minibatch",
            "trainer.logprobs_chunk_size",
            "trainer.vocab_entropy_*", "trainer.fused_lm_head_*", "trainer.flash_attn"),
    without("the critic has the policy's batches, and the settings of [optimizer]", "trainer.critic_mini_batch_size",
        "trainer.critic.*"),
    without("nmoe evaluates before the first step", "trainer.eval_before_train", "trainer.eval_batch_size"),
    without("samples and evaluations are in the run's directory", "trainer.dump_*", "trainer.print_example_interval",
        "trainer.log_example_interval",
            "trainer.num_logger_*", "trainer.log_path", "trainer.tags", "trainer.enable_ray_gpu_monitor",
            "trainer.tracker_commit_each_step"),
    without("[placement] starts engines and ranks", "trainer.placement.*"),
    without("groups under way are (max_staleness + 1) times the prompts of a step",
        "trainer.fully_async.num_parallel_generation_workers",
            "trainer.fully_async.*"),
    without("a run reads its data in its own process", "data.dataloader.*", "trainer.disable_fast_tokenizer", "data.*"),
    without("nmoe resumes from the newest checkpoint of the run", "trainer.resume_path"),
    without("a longer context is model.context_tokens", "trainer.rope_scaling", "trainer.rope_theta", neutral=None),
    without("a longer context is model.context_tokens", "trainer.rope_scaling.*"),
    without("nmoe predicts one token at a time", "trainer.mtp.*"),
    without("the configuration that the keys are laid over; SkyRL's own has the defaults of this table", "config-path",
        "config-name", "config_path",
            "config_name", "config", "defaults", "hydra.*", "defaults.*"),
)  # fmt: skip

_ALIASES = {
    **{f"generator.{name}": f"{_ENGINE}.{name}" for name in (
        "backend", "run_engines_locally", "gpu_memory_utilization", "max_num_seqs", "weight_sync_backend", "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill", "max_num_batched_tokens", "model_dtype", "vllm_v1_disable_multiproc", "fully_sharded_loras",
        "weight_transfer_threshold_cuda_ipc_GB",
    )},
    "generator.num_inference_engines": f"{_ENGINE}.num_engines",
    "generator.inference_engine_tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    "generator.remote_inference_engine_urls": f"{_ENGINE}.external_server_urls",
    "trainer.mini_batch_size": "trainer.policy_mini_batch_size",
}  # fmt: skip

RL = Program(
    trainer="SkyRL", name="skyrl", command="rl train", source="skyrl 0.4.0, skyrl/train/config/config.py", rows=_ROWS,
        aliases=_ALIASES,
    modules=("skyrl.train.entrypoints", "skyrl_train.entrypoints", "skyrl_train.cli", "skyrl_train"),
    defaults={
        f"{_POLICY}.model.path": "Qwen/Qwen2.5-1.5B-Instruct", "trainer.bf16": True, "trainer.gradient_checkpointing": True,
        f"{_POLICY}.fsdp_config.cpu_offload": False, f"{_POLICY}.model.lora.rank": 0, f"{_POLICY}.model.lora.alpha": 16,
        f"{_POLICY}.model.lora.target_modules": "all-linear", f"{_POLICY}.model.lora.init_method": "kaiming",
        "trainer.train_batch_size": 1024,
        "generator.n_samples_per_prompt": 5, "trainer.policy_mini_batch_size": 256, "trainer.update_epochs_per_batch": 1,
        "trainer.micro_train_batch_size_per_gpu": 1, "trainer.max_tokens_per_microbatch": -1, "trainer.epochs": 1,
        "trainer.seed": 42,
        f"{_ALGORITHM}.dynamic_sampling.max_sample_batches": 30, "generator.sampling_params.max_generate_length": 1024,
        "trainer.max_prompt_length": 512,
        "generator.max_turns": 1, "generator.sampling_params.temperature": 1.0, "generator.sampling_params.top_p": 1.0,
        "generator.sampling_params.top_k": -1, f"{_ALGORITHM}.advantage_estimator": "grpo",
        f"{_ALGORITHM}.grpo_norm_by_std": True,
        f"{_ALGORITHM}.advantage_batch_normalize": False, f"{_ALGORITHM}.policy_loss_type": "regular",
        f"{_ALGORITHM}.eps_clip_low": 0.2,
        f"{_ALGORITHM}.eps_clip_high": 0.2, f"{_ALGORITHM}.clip_ratio_c": 3.0, f"{_ALGORITHM}.cispo.cispo_eps_clip_high": 4.0,
        f"{_ALGORITHM}.dppo.dppo_type": "binary_tv", f"{_ALGORITHM}.dppo.delta_low": 0.2, f"{_ALGORITHM}.dppo.delta_high": 0.2,
        f"{_ALGORITHM}.loss_reduction": "token_mean", f"{_ALGORITHM}.use_kl_loss": True,
        f"{_ALGORITHM}.use_kl_in_reward": False,
        f"{_ALGORITHM}.kl_loss_coef": 0.001, f"{_ALGORITHM}.kl_estimator_type": "k3", f"{_ALGORITHM}.kl_ctrl.type": "fixed",
        f"{_ALGORITHM}.use_entropy_loss": False, f"{_ALGORITHM}.entropy_loss_coef": 0.01, f"{_ALGORITHM}.use_tis": False,
        f"{_ALGORITHM}.tis_imp_ratio_cap": -1.0, f"{_OFF}.token_tis_ratio_clip_high": 2.0,
        f"{_OFF}.sequence_tis_ratio_clip_high": 5.0,
        f"{_OFF}.geo_mask_low": 0.99, f"{_OFF}.geo_mask_high": 1.01, "generator.apply_overlong_filtering": False,
        "trainer.critic.optimizer_config.lr": 5e-6, f"{_ALGORITHM}.gamma": 1.0, f"{_ALGORITHM}.lambd": 1.0,
        f"{_ALGORITHM}.value_clip": 0.2,
        f"{_OPTIMIZER}.lr": 1e-6, f"{_OPTIMIZER}.scheduler": "constant_with_warmup", f"{_OPTIMIZER}.num_warmup_steps": 0,
        f"{_OPTIMIZER}.adam_betas": [0.9, 0.999], f"{_OPTIMIZER}.weight_decay": 0.01, f"{_OPTIMIZER}.max_grad_norm": 1.0,
        "data.train_data": ["~/data/gsm8k/train.parquet"], "data.val_data": ["~/data/gsm8k/validation.parquet"],
        "environment.env_class": "gsm8k",
        "trainer.eval_interval": 5, "generator.eval_n_samples_per_prompt": 1, f"{_ENGINE}.backend": "vllm",
        f"{_ENGINE}.num_engines": 1,
        f"{_ENGINE}.gpu_memory_utilization": 0.8, f"{_ENGINE}.max_num_seqs": 1024, f"{_ENGINE}.run_engines_locally": True,
        "trainer.placement.colocate_all": True, "trainer.placement.policy_num_nodes": 1, "trainer.fully_async.enabled": False,
        "trainer.fully_async.max_staleness_steps": 4, "trainer.ckpt_interval": 10, "trainer.max_ckpts_to_keep": -1,
        "trainer.run_name": "test_run",
        "trainer.export_path": "~/exports/", "trainer.hf_save_interval": -1, "trainer.logger": "wandb",
        "trainer.project_name": "skyrl",
        "trainer.resume_mode": "latest", "generator.zero_reward_on_non_stop": False, "trainer.update_ref_every_epoch": False,
        "generator.sampling_params.min_p": 0.0, "generator.sampling_params.repetition_penalty": 1.0,
        f"{_POLICY}.model.lora.dropout": 0.0,
    },
    always=(GROUPS_DROPPED.format(trainer="SkyRL"),),
)  # fmt: skip

PROGRAMS = (RL,)
