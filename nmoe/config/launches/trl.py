"""TRL: `trl grpo`, `rloo`, `sft`, `dpo` and `reward`, and scripts that take their arguments.

Keys and defaults are from TRL 1.16.0 (`trl/trainer/*_config.py`, `trl/scripts/utils.py`, `trl/trainer/model_config.py`) over
transformers' TrainingArguments; keys of older versions are named beside. A step of GRPO is `generation_batch_size` samples
(`GRPOConfig.__post_init__`); its losses are in `GRPOTrainer._compute_loss`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nmoe.config.launches.concepts import length, model, optimizer, sinks, template
from nmoe.config.launches.read import read_yaml
from nmoe.config.launches.rows import (
    Converted,
    Program,
    Reading,
    Row,
    number,
    same,
    switch,
    together,
    whole,
    without,
)
from nmoe.config.launches.shared import (
    EVALUATED,
    FILL_IN,
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
    name_of_dataset,
    nearest,
    of_the_run,
    pool,
    probe,
    records,
    reward_model,
    truncated_in_mean,
    uncorrected,
    updates,
    warmup_of_run,
)


def _processes(reading: Reading) -> int:
    """Returns how many processes train; 1, with a note, where the launch does not say it."""
    given = reading["num_processes"] or reading.option("num_processes")
    if given is None and (file := reading.option("config_file")) is not None and Path(str(file)).is_file():
        given = one.value if (one := read_yaml(Path(str(file))).get("num_processes")) else None
    if given is None and (per_node := reading.option("nproc_per_node", "nproc-per-node")) is not None:
        nodes = reading.option("nnodes")
        given = per_node * (nodes if isinstance(nodes, int) else 1) if isinstance(per_node, int) else None
    if given is None and (gpus := reading.option("num_gpus")) is not None:
        given = gpus
    if isinstance(given, int):
        return max(1, given)
    reading.differs(
        "the launch does not say how many processes train: 1 is taken. With N of them TRL's steps are N times as large: raise "
        "batch.prompts_per_step (records.tokens_per_step) N times"
    )
    return 1


def _batch(reading: Reading) -> Converted:
    accumulation, group = max(1, reading.whole("gradient_accumulation_steps", 1)), reading.whole("num_generations", 8)
    at_once = reading.whole("per_device_train_batch_size", 8) * _processes(reading)
    samples = reading.whole("generation_batch_size") or at_once * (
        reading.whole("steps_per_generation") or accumulation
    )
    prompts = max(1, samples // max(1, group))
    if samples % max(1, group):
        reading.differs(
            f"{samples} samples of a step are no multiple of num_generations = {group}, which TRL refuses; "
            f"{prompts} prompts are written"
        )
    steps = updates(reading, samples, at_once * accumulation, prompts, "gradient_accumulation_steps")
    found = {"batch.prompts_per_step": prompts, "batch.group_size": group, "batch.updates_per_step": steps}
    return {**found, "batch.passes_per_step": reading.whole("num_iterations", 1)}


def _microbatch(reading: Reading) -> Converted:
    longest = reading.whole("max_completion_length") + (reading.whole("max_prompt_length") or 512)
    return {"batch.tokens_per_microbatch": max(1, reading.whole("per_device_train_batch_size", 8)) * longest}


def _optimizer_steps(reading: Reading) -> int:
    """Returns how many steps of the optimizer a step of the run has."""
    if reading.program.command != "rl train":
        return 1
    return max(1, int(_batch(reading)["batch.updates_per_step"]) * reading.whole("num_iterations", 1))


def _length(reading: Reading) -> Converted:
    if (steps := reading.whole("max_steps", -1)) > 0:
        return {"run.steps": math.ceil(steps / _optimizer_steps(reading))}
    return {"run.episodes": float(reading.number("num_train_epochs", 3.0))}


def _schedule(reading: Reading) -> Converted:
    kind = str(reading["lr_scheduler_type"])

    def least() -> float | None:
        extra = reading.below("lr_scheduler_kwargs")
        if extra.get("min_lr") is None:
            return extra.get("min_lr_rate")
        return float(extra["min_lr"]) / float(reading["learning_rate"])

    found: dict[str, Any] = {"optimizer.min_lr_ratio": end_of_schedule(reading, kind, least)}
    if kind == "constant":  # transformers ignores a warm-up
        return found
    if (warmup := reading.number("warmup_steps")) >= 1:
        return {**found, "optimizer.warmup_steps": warmup_of_run(reading, int(warmup), _optimizer_steps(reading))}
    share = warmup or reading.number("warmup_ratio")
    return {**found, "optimizer.warmup_ratio": float(share) if share else None}


def _precision(reading: Reading) -> Converted:
    """bf16 is on by default, and weights are kept in float32 beside it, as nmoe's master weights."""
    if reading.yes("fp16"):
        return {"model.precision": "float16"}
    if reading["bf16"] is None or reading.yes("bf16"):
        return {"model.precision": "bfloat16"}
    key = "dtype" if reading.has("dtype") or not reading.has("torch_dtype") else "torch_dtype"
    return {"model.precision": nearest(reading, key, PRECISIONS, "float32")}


def _lora(reading: Reading) -> Converted:
    if not reading.yes("use_peft"):
        return {}
    targets = reading["lora_target_modules"]
    if targets is None:
        reading.differs(
            "lora_target_modules: PEFT's default for most families is q_proj and v_proj; look it up for this model"
        )
        targets = ["q_proj", "v_proj"]
    if reading.number("lora_dropout", 0.05):
        reading.differs(f"lora_dropout = {reading.number('lora_dropout', 0.05)}: nmoe's adapters have no dropout")
    return {
        "lora.rank": reading.whole("lora_r", 16), "lora.alpha": float(reading.number("lora_alpha", 32)),
        "lora.rslora": reading.yes("use_rslora"),
        "lora.targets": lora_targets(reading, targets),
    }  # fmt: skip


_LOSSES = {
    "grpo": ("clip", "sequence"),
    "dapo": ("clip", "token"),
    "bnpo": ("clip", "token"),
    "dr_grpo": ("clip", "constant"),
    "cispo": ("cispo", "token"),
}


def _loss(reading: Reading) -> Converted:
    kind = str(reading["loss_type"])
    loss, aggregation = _LOSSES.get(kind, ("clip", "sequence"))
    high = float(reading["epsilon_high"] or reading.number("epsilon", 0.2))
    if kind not in _LOSSES:
        reading.differs(f"loss_type = {kind}: nmoe has no such loss; PPO's clipped ratio is written")
    if kind == "bnpo":
        reading.differs(
            "loss_type = bnpo takes the mean over the tokens of each micro-batch; nmoe over all tokens of the update"
        )
    if kind in ("dapo", "cispo") and int(_batch(reading)["batch.updates_per_step"]) > 1:
        reading.differs(
            f"loss_type = {kind} divides each update by the tokens of the whole generation batch over its number of updates; "
            f"nmoe by the update's own tokens"
        )
    if reading.yes("mask_truncated_completions"):
        truncated_in_mean(reading, aggregation)
    if reading.number("entropy_coef") and aggregation != "token":
        reading.differs(
            f"entropy_coef: TRL's bonus is the mean entropy of tokens; nmoe's is weighed as the loss is, by {aggregation}"
        )
    if loss == "cispo":
        # TRL's bound is on the ratio, nmoe's on its distance from 1.
        if high <= 1:
            reading.differs(
                f"loss_type = cispo with epsilon_high = {high}: TRL weighs no token by more than {high}; nmoe's bound lies above "
                f"1, and 1.001 is written"
            )
        return {
            "algorithm.loss": "cispo",
            "algorithm.aggregation": aggregation,
            "algorithm.clip_high": max(high - 1, 1e-3),
        }
    found: dict[str, Any] = {
        "algorithm.clip_low": float(reading.number("epsilon", 0.2)),
        "algorithm.clip_high": high,
        "algorithm.aggregation": aggregation,
    }
    level = nearest(reading, "importance_sampling_level", {"token": "token", "sequence": "sequence"}, "token")
    bound = reading["delta"]
    if level == "sequence":
        if aggregation != "sequence":
            reading.differs(
                f"one ratio per sequence with loss_type = {kind}: nmoe's gspo takes the mean of sequences, not "
                f"of tokens"
            )
        if bound is not None:
            reading.differs(f"delta = {bound}: nmoe's gspo does not bound the ratio of negative advantages")
        return {**found, "algorithm.loss": "gspo", "algorithm.aggregation": "sequence"}
    if bound is not None:
        return {**found, "algorithm.loss": "dual_clip", "algorithm.dual_clip_bound": float(bound)}
    return {**found, "algorithm.loss": loss}


def _kl(reading: Reading) -> Converted:
    if not (coef := reading["beta"]):
        return {"algorithm.kl_coef": 0.0}
    weighted = reading.yes("use_bias_correction_kl")
    if weighted and reading["importance_sampling_level"] == "sequence":
        reading.differs("the KL term is weighed by the ratio of the sequence in TRL, in nmoe by the token's")
    if weighted and reading.yes("use_vllm"):
        reading.differs(
            "the KL term is weighed by the ratio to the learner before the update in TRL, in nmoe to the engine"
        )
    return kl(coef, "loss", "k3", weighted)


def _advantage(reading: Reading) -> Converted:
    how = {"sum_then_normalize": "sum", "normalize_then_sum": "gdpo"}
    if nearest(reading, "multi_objective_aggregation", how, "sum") == "gdpo":
        return {"algorithm.advantage": "grpo", "algorithm.multi_reward": "gdpo"}
    if str(reading["scale_rewards"]).lower() == "batch":
        reading.differs("scale_rewards = batch divides by the deviation over the batch; nmoe's dr_grpo does not divide")
        return {"algorithm.advantage": "dr_grpo"}
    # Older versions have a switch.
    names = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}
    return {"algorithm.advantage": nearest(reading, "scale_rewards", names, "grpo")}


def _correction(reading: Reading) -> Converted:
    if not reading.yes("use_vllm"):
        return {}
    if not reading.yes("vllm_importance_sampling_correction"):
        return uncorrected(reading, _optimizer_steps(reading), True)
    mode = str(reading["vllm_importance_sampling_mode"])
    low, high = reading["vllm_importance_sampling_clip_min"], reading["vllm_importance_sampling_cap"]
    high = reading["vllm_importance_sampling_clip_max"] if high is None else high
    if mode.endswith("_truncate"):
        if mode == "sequence_truncate" or low is not None:
            reading.differs(f"{mode}: nmoe's tis caps the ratio of each token from above, and not from below")
        if high is None or high < 1:
            reading.differs(f"{mode} without a cap of at least 1: nmoe's is {max(1.0, high or 1e9):g}")
        return {"algorithm.correction": "tis", "algorithm.correction_cap": max(1.0, float(high or 1e9))}
    if mode == "token_mask":
        return {"algorithm.correction": "mask", "algorithm.correction_window": [float(low or 1e-9), float(high or 1e9)]}
    reading.differs(
        f"sequence_mask leaves sequences out whose product of ratios is above {high}"
        + (f" or below {low}" if low is not None else "")
        + ", and weighs the others by it; nmoe's looks at the geometric mean of a token (algorithm.correction_window), and weighs "
        "tokens by their own ratio"
    )
    return {"algorithm.correction": "sequence_mask"}


def _engine(reading: Reading) -> Converted:
    if not reading.yes("use_vllm"):
        return {}
    if nearest(reading, "vllm_mode", {"server": "server", "colocate": "colocate"}, "colocate") == "server":
        base = reading["vllm_server_base_url"]
        host = {"0.0.0.0": "127.0.0.1"}.get(str(reading["vllm_server_host"]), reading["vllm_server_host"])
        reading.fill(
            "engine.urls",
            "servers started with nmoe's plugin for vLLM (docs/guides/engines.md); `trl vllm-serve` "
            "has another protocol",
        )
        return {"engine.kind": "vllm", "engine.urls": [str(base or f"http://{host}:{reading['vllm_server_port']}")]}
    processes, parallel = _processes(reading), reading.whole("vllm_tensor_parallel_size", 1)
    return {
        "engine.kind": "vllm",
        **colocated(reading),
        "placement.engines": max(1, processes // max(1, parallel)),
        "placement.learner_gpus": processes,
        "placement.tensor_parallel": parallel,
        "placement.memory_share": float(reading.number("vllm_gpu_memory_utilization", 0.3)),
    }


def _data(reading: Reading) -> Converted:
    dataset = reading["dataset_name"]
    if dataset is None:
        reading.fill("environment.task_pool.path", "the problems to train on; the launch's script loads them")
        return {
            "environment.env_id": "problems",
            "environment.task_pool.type": "jsonl",
            "environment.task_pool.path": f"{FILL_IN}/train.jsonl",
        }
    found = pool(reading, "environment.task_pool", "dataset_name", "dataset_train_split", "dataset_config")
    found["environment.env_id"] = name_of_dataset(dataset)
    if "accuracy_reward" in _functions(reading):
        found["environment.task_pool.answer_field"] = "solution"  # the column that accuracy_reward reads
    return found


def _functions(reading: Reading) -> list[str]:
    given = reading["reward_funcs"]
    return [str(one) for one in given] if isinstance(given, list) else [] if given is None else [str(given)]


def _rewards(reading: Reading) -> Converted:
    functions, model = _functions(reading), reading["reward_model_name_or_path"]
    if not functions and model is None:
        return grader(reading, ["the reward functions of the launch's script"])
    given = reading["reward_weights"]
    weights = [float(one) for one in given] if isinstance(given, list) else [] if given is None else [float(given)]
    named = [*([str(model)] if model else []), *functions]
    weights += [1.0] * (len(named) - len(weights))
    found: dict[str, Any] = {"environment.task": "open"}
    index = 0
    for position, (name, weight) in enumerate(zip(named, weights, strict=False)):
        key = f"environment.rewards.{index}"
        if name == "accuracy_reward":
            found |= {"environment.task": "math", "environment.rubric.correctness": weight}
            continue
        if name == "get_soft_overlong_punishment":
            found["algorithm.overlong_buffer"] = 256
            if reading.whole("max_completion_length") != 1280 or weight != 1:
                reading.differs(
                    "get_soft_overlong_punishment counts from 1280 tokens; algorithm.overlong_buffer counts from "
                    "sampling.max_new_tokens"
                )
            continue
        if model and position == 0:
            found |= {**reward_model(reading, name), f"{key}.weight": weight}
        else:
            module, _, function = name.rpartition(".")
            found |= {
                f"{key}.type": "function",
                f"{key}.name": function,
                f"{key}.call": f"{module or 'trl.rewards'}:{function}",
                f"{key}.weight": weight,
            }
        index += 1
    if index == 0 and "environment.rubric.correctness" not in found:
        return {**found, **grader(reading, functions)}
    return found


def _period(reading: Reading) -> int | None:
    """Returns how often TRL evaluates, in its steps; None for never."""
    if reading["eval_strategy"] in (None, "no", False):
        return None
    if reading["eval_strategy"] == "epoch":
        reading.differs(
            "eval_strategy = epoch: nmoe evaluates every eval.every_steps steps; set it to the steps of an epoch"
        )
        return 50
    return reading.whole("eval_steps") or reading.whole("logging_steps", 10)


def _probe(reading: Reading) -> Converted:
    if reading["dataset_name"] is None or (every := _period(reading)) is None:
        return {}
    if (of_each := _optimizer_steps(reading)) > 1 and reading["eval_strategy"] != "epoch":
        every = of_the_run(reading, every, of_each, "steps between evaluations")
    reading.differs(EVALUATED.format(trainer="TRL"))
    prefix = "eval.0.environment"
    found = pool(reading, f"{prefix}.task_pool", "dataset_name", "dataset_test_split", "dataset_config")
    functions = _functions(reading)
    if functions and "accuracy_reward" not in functions:
        reading.fill(
            f"{prefix}.task",
            "a task that grades answers: nmoe's evaluations count right answers, and functions alone have none",
        )
    if "accuracy_reward" in functions:
        found[f"{prefix}.task_pool.answer_field"] = "solution"
    sampled = probe(reading["temperature"], reading["num_generations_eval"] or reading["num_generations"])
    own = {f"{prefix}.env_id": f"{name_of_dataset(reading['dataset_name'])}_eval", f"{prefix}.task": "math"}
    return {"eval.0.every_steps": every, **sampled, **own, **found}


def _reference(reading: Reading) -> Converted:
    if not reading.yes("sync_ref_model") or not reading.number("beta"):
        return {}
    if reading.number("ref_model_mixup_alpha", 0.6) != 1:
        reading.differs(
            "sync_ref_model mixes the policy into the reference by ref_model_mixup_alpha; nmoe replaces the reference"
        )
    every = of_the_run(
        reading, reading.whole("ref_model_sync_steps", 512), _optimizer_steps(reading), "steps of a reference"
    )
    return {"algorithm.reference_every_steps": every}


def _run(reading: Reading) -> Converted:
    out, named = reading["output_dir"], reading["run_name"]
    parent, _, last = at_home(out or "").rstrip("/").rpartition("/")
    return {"run.name": name_of(named) or name_of(last) if named or last else None, "run.directory": parent or None}


def _saving(reading: Reading) -> Converted:
    strategy = str(reading["save_strategy"])
    if strategy == "steps":
        every = reading.number("save_steps", 500)
        if every < 1:
            reading.differs(f"save_steps = {every}: a share of the run; nmoe saves every checkpoint.every_steps steps")
            return {}
        return {
            "checkpoint.every_steps": of_the_run(
                reading, int(every), _optimizer_steps(reading), "steps between checkpoints"
            )
        }
    reading.differs(f"save_strategy = {strategy}: nmoe saves every checkpoint.every_steps steps, and at the end")
    return {}


def _resume(reading: Reading) -> Converted:
    given = reading["resume_from_checkpoint"]
    if given in (None, False):
        return {}
    if given is not True:
        reading.differs(
            f"resume_from_checkpoint = {given}: nmoe resumes the run of the same name; to start from its "
            f"weights, name it in model.path"
        )
    return {"run.resume": "auto"}


_SHARED: tuple[Row, ...] = (
    model("model_name_or_path", "the checkpoint to start from; the launch names it in its script"),
    together(dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype"), "model.precision"), _precision,
        "bfloat16 unless bf16 = false; master weights are float32"),
    together({"use_cpu": "model.device"}, lambda r: {"model.device": "cpu" if r.yes("use_cpu") else None}, "true: cpu"),
    switch("gradient_checkpointing", "model.checkpoint_activations"),
    same("router_aux_loss_coef", "model.router_aux_loss_coef"),
    together({"use_peft": ("lora", "lora.rank"), "lora_r": "lora.rank", "lora_alpha": "lora.alpha", "use_rslora": "lora.rslora",
              "lora_target_modules": "lora.targets", "lora_dropout": ()}, _lora, "only with use_peft"),
    same("seed", "run.seed"),
    number("learning_rate", "optimizer.learning_rate"),
    together({"lr_scheduler_type": "optimizer.min_lr_ratio", "lr_scheduler_kwargs": "optimizer.min_lr_ratio",
              "lr_scheduler_kwargs.*": "optimizer.min_lr_ratio", "warmup_steps": "optimizer.warmup_steps",
              "warmup_ratio": "optimizer.warmup_ratio"}, _schedule,
             "linear warm-up, then a half cosine to a share of the peak; constant schedules end at 1; warmup_steps below 1 "
             "are a share"),
    optimizer("optim"),
    number("adam_beta1", "optimizer.beta1"),
    number("adam_beta2", "optimizer.beta2"),
    number("adam_epsilon", "optimizer.eps"),
    number("weight_decay", "optimizer.weight_decay"),
    number("max_grad_norm", "optimizer.max_grad_norm"),
    together(dict.fromkeys(("save_steps", "save_strategy"), "checkpoint.every_steps"), _saving,
        "the same; TRL counts optimizer steps, nmoe steps of the run"),
    whole("save_total_limit", "checkpoint.keep", "the same; without it TRL keeps all, nmoe its default"),
    together({"output_dir": "run.directory", "run_name": "run.name"}, _run, "the last part of the path is the run's name"),
    together({"resume_from_checkpoint": "run.resume"}, _resume, "auto"),
    sinks("report_to", "project"),
    without("the launcher's configuration of processes; nmoe has [placement] and [parallel]", "accelerate_config",
        "config_file", "deepspeed",
            "fsdp", "fsdp_config", "fsdp_config.*", "ddp_*", "local_rank", "parallelism_config", "parallelism_config.*",
            "accelerator_config",
            "accelerator_config.*", "average_tokens_across_devices"),
    without("the file whose keys are read", "config"),
    without("every step is recorded", "logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_level",
        "log_level_replica",
            "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "disable_tqdm", "log_completions",
            "log_multimodal",
            "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo", "skip_memory_metrics", "debug",
            "include_tokens_per_second"),
    without("`nmoe export` writes a checkpoint, and `hf upload` sends it", "push_to_hub", "hub_model_id", "hub_strategy",
        "hub_private_repo", "hub_always_push",
            "hub_revision"),
    without("`nmoe export` writes a checkpoint, and `hf upload` sends it", "hub_token", secret=True),
    without("nmoe chooses its own kernels of attention and of the loss", "attn_implementation", "use_liger_kernel",
        "use_liger_loss", "liger_kernel_config",
            "padding_free", "pad_to_multiple_of", "activation_offloading", "model_init_kwargs", "model_init_kwargs.*",
            "cache_implementation", "use_cache",
            "torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32", "torch_empty_cache_steps",
            "gradient_checkpointing_kwargs",
            "gradient_checkpointing_kwargs.*", "activation_checkpointing", "activation_checkpointing_kwargs",
            "cast_lm_head_to_fp32"),
    without("a run reads its data in its own process", "dataset_num_proc", "dataloader_*", "dataset_streaming",
        "preprocessing_num_workers", "ignore_bias_buffers",
            "remove_unused_columns", "label_names", "length_column_name", "dataset_kwargs", "dataset_kwargs.*",
            "group_by_length", "train_sampling_strategy"),
    without("the order of the data is drawn from the run's seed", "data_seed", "shuffle_dataset", "ignore_data_skip"),
    without("nmoe executes no code that comes with a checkpoint", "trust_remote_code"),
    without("a model's revision is chosen by `hf download`", "model_revision"),
    without("nmoe's optimizers have their settings in [optimizer]", "optim_args", "optim_target_modules"),
    without("nmoe trains adapters on a base in the run's precision", "load_in_4bit", "load_in_8bit", "use_dora", neutral=False),
    without("nmoe trains adapters on a base in the run's precision", "bnb_4bit_quant_type", "use_bnb_nested_quant",
        "bnb_4bit_quant_storage", "lora_task_type"),
    without("nmoe adapts projections alone", "lora_modules_to_save", "lora_target_parameters", neutral=None),
    without("the models of nmoe's families have no dropout", "disable_dropout"),
    without("nmoe smooths no labels", "label_smoothing_factor", neutral=0.0),
    without("nmoe adds no noise to embeddings", "neftune_noise_alpha", neutral=None),
    without("the best checkpoint is kept beside the newest ones (docs/guides/evaluation.md)", "load_best_model_at_end",
        "metric_for_best_model",
            "greater_is_better", "save_only_model", "save_on_each_node", "save_safetensors", "overwrite_output_dir",
            "enable_jit_checkpoint",
            "restore_callback_states_from_checkpoint"),
    without("nmoe chooses its own batches of evaluation", "per_device_eval_batch_size", "eval_accumulation_steps", "eval_delay",
        "batch_eval_metrics",
            "eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics", "prediction_loss_only", "bf16_full_eval",
            "fp16_full_eval"),
    without("nmoe evaluates before the first step", "eval_on_start"),
    without("nmoe always trains; `nmoe eval` evaluates", "do_train", "do_eval", "do_predict"),
    without("nmoe's runs repeat bit for bit with model.numerics = \"exact\"", "full_determinism"),
    without("a batch that does not fit is refused by `nmoe preflight`", "auto_find_batch_size"),
    without("trackio's own variables say where it sends", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    without("TRL's own mixture of datasets; [[records.sources]] and [[environment.task_pool.sources]] mix in nmoe", "datasets",
        "streaming", "test_split_size",
            neutral=None),
)  # fmt: skip

_ONLINE: tuple[Row, ...] = (
    together({"per_device_train_batch_size": "batch.prompts_per_step", "gradient_accumulation_steps": "batch.prompts_per_step",
              "steps_per_generation": "batch.updates_per_step", "generation_batch_size": "batch.prompts_per_step",
              "num_generations": "batch.group_size", "num_iterations": "batch.passes_per_step",
              "num_processes": "batch.prompts_per_step"}, _batch,
             "generation_batch_size / num_generations prompts; one update for each batch of optimization in it"),
    together({"max_steps": "run.steps", "num_train_epochs": "run.episodes"}, _length,
        "TRL counts optimizer steps, nmoe steps of sampling"),
    together({"max_completion_length": "sampling.max_new_tokens", "max_prompt_length": "environment.budget.prompt_tokens"},
             lambda r: {"sampling.max_new_tokens": r.whole("max_completion_length"),
             "environment.budget.prompt_tokens": r.whole("max_prompt_length") or None},
             "the same; prompts that are longer are left out, and were cut by versions of TRL that have the key"),
    together({"per_device_train_batch_size": "batch.tokens_per_microbatch"}, _microbatch,
             "sequences of a device times the longest prompt (512 where it is not given) and completion"),
    number("temperature", "sampling.temperature"),
    number("top_p", "sampling.top_p"),
    whole("top_k", "sampling.top_k"),
    together({"dataset_name": "environment.task_pool.path", "dataset_config": "environment.task_pool.subset",
              "dataset_train_split": "environment.task_pool.split"}, _data,
             "a file, or a dataset of the hub; with accuracy_reward, the column `solution` has the answer"),
    together(dict.fromkeys(("reward_funcs", "reward_weights", "reward_model_name_or_path"), "environment.rewards"), _rewards,
             "accuracy_reward: the task `math`; others are called as functions; a reward model goes into [[rewards]]"),
    together({"eval_strategy": "eval.0.every_steps", "eval_steps": "eval.0.every_steps", "dataset_test_split": "eval.0.environment",
              "num_generations_eval": "eval.0.samples"}, _probe, "[[eval]] on the test split"),
    together({"use_vllm": "engine.kind", "vllm_mode": "placement.layout", "vllm_server_base_url": "engine.urls",
              "vllm_server_host": "engine.urls", "vllm_server_port": "engine.urls",
              "vllm_tensor_parallel_size": "placement.tensor_parallel", "vllm_gpu_memory_utilization": "placement.memory_share"},
             _engine, "colocate: engines on the GPUs that train; server: running engines"),
    template("chat_template_kwargs"),
    switch("mask_truncated_completions", "algorithm.mask_truncated"),
    together(dict.fromkeys(("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"), "algorithm.reference_every_steps"),
             _reference, "without mixing; TRL counts optimizer steps, nmoe steps of the run"),
    without("nmoe samples by temperature, top_p and top_k alone", "min_p", neutral=None),
    without("nmoe samples by temperature, top_p and top_k alone", "generation_kwargs", neutral=None),
    without("nmoe samples by temperature, top_p and top_k alone", "repetition_penalty", neutral=1.0),
    without("nmoe samples with its engine or with vLLM", "use_transformers_paged", "use_transformers_continuous_batching",
            "transformers_continuous_batching_config", "ds3_gather_for_generation", "vllm_model_impl", "vllm_enable_sleep_mode",
            "vllm_max_model_length",
            "vllm_server_timeout", "vllm_group_port", "vllm_guided_decoding_regex"),
    without("nmoe constrains no answers", "vllm_structured_outputs_regex", neutral=None),
)  # fmt: skip


# TRL replaces no groups, and has no key for it.
_NO_REFILLS = Row({}, "groups without a signal are not replaced", lambda r: {"batch.max_refills": 0})

_GRPO_ROWS = (
    *_SHARED,
    *_ONLINE,
    _NO_REFILLS,
    together({"loss_type": ("algorithm.loss", "algorithm.aggregation"), "epsilon": "algorithm.clip_low",
              "epsilon_high": "algorithm.clip_high", "delta": "algorithm.dual_clip_bound",
              "importance_sampling_level": "algorithm.loss"}, _loss,
             "grpo: mean of sequences; dapo, bnpo: mean of tokens; dr_grpo: constant; cispo: clip_high = epsilon_high - 1; "
             "delta: dual_clip; sequence: gspo"),
    together({"scale_rewards": "algorithm.advantage", "multi_objective_aggregation": "algorithm.multi_reward"}, _advantage,
             "group: grpo; none: dr_grpo; normalize_then_sum: gdpo"),
    together({"beta": ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.kl_estimator"),
              "use_bias_correction_kl": "algorithm.kl_importance_weights"}, _kl, "k3 in the loss"),
    number("entropy_coef", "algorithm.entropy_coef"),
    together({"vllm_importance_sampling_correction": "algorithm.correction",
              "vllm_importance_sampling_mode": "algorithm.correction",
              "vllm_importance_sampling_clip_min": "algorithm.correction_window",
              "vllm_importance_sampling_clip_max": "algorithm.correction_cap",
              "vllm_importance_sampling_cap": "algorithm.correction_cap"}, _correction,
             "token_truncate: tis; token_mask: mask; sequence_mask: nmoe's, of the geometric mean"),
    without("nmoe trains on all tokens", "top_entropy_quantile", neutral=1.0),
    without("the entropy coefficient is constant in nmoe", "use_adaptive_entropy", neutral=False),
    without("the entropy coefficient is constant in nmoe", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
        "entropy_target"),
    without("settings of losses that nmoe does not have", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_*"),
    without("nmoe corrects for stale samples by algorithm.correction", "off_policy_mask_threshold", neutral=None),
    without("environment.budget.turns bounds the turns", "max_tool_calling_iterations", neutral=None),
)  # fmt: skip

_RLOO_ROWS = (
    *_SHARED,
    *_ONLINE,
    _NO_REFILLS,
    together({"epsilon": ("algorithm.clip_low", "algorithm.loss", "algorithm.aggregation"), "epsilon_high": "algorithm.clip_high"},
             lambda r: {"algorithm.loss": "clip", "algorithm.aggregation": "constant",
                        "algorithm.clip_low": float(r["epsilon"]), "algorithm.clip_high": float(r["epsilon_high"] or r["epsilon"])},
             "sums over sequences: constant"),
    together({"normalize_advantages": "algorithm.advantage"}, lambda r: _rloo(r), "rloo"),
    together({"beta": ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.kl_estimator")},
             lambda r: kl(r["beta"], "reward", "k1"), "k1 in the reward"),
    without("nmoe clips no rewards", "reward_clip_range", neutral=None),
)  # fmt: skip


def _rloo(reading: Reading) -> Converted:
    if reading.yes("normalize_advantages"):
        reading.differs("normalize_advantages: nmoe's rloo does not divide by the deviation over the batch")
    return {"algorithm.advantage": "rloo"}


def _tokens(sequences: int) -> Any:
    def convert(reading: Reading) -> Converted:
        at_once = reading.whole("per_device_train_batch_size", 8)
        longest = reading.whole("max_length" if reading["max_length"] else "max_seq_length") or 1024
        count = at_once * max(1, reading.whole("gradient_accumulation_steps", 1)) * _processes(reading)
        if reading.yes("packing"):
            tokens = count * longest * sequences
            return {"records.tokens_per_step": tokens, "batch.tokens_per_microbatch": at_once * longest * sequences}
        return examples(reading, count, longest, at_once, sequences)

    return convert


def _held_out(reading: Reading) -> Converted:
    if (every := _period(reading)) is None:
        return {}
    return {"eval.0.every_steps": every, "records.held_out_split": reading["dataset_test_split"]}


def _supervised(sequences: int) -> tuple[Row, ...]:
    return (
        *_SHARED,
        together({"per_device_train_batch_size": ("records.tokens_per_step", "batch.tokens_per_microbatch"),
                  "gradient_accumulation_steps": "records.tokens_per_step", "max_length": "records.tokens_per_step",
                  "max_seq_length": "records.tokens_per_step", "num_processes": "records.tokens_per_step",
                  "packing": "records.tokens_per_step"},
                 _tokens(sequences), "sequences times their longest length, as nmoe counts tokens"),
        length("max_steps", "num_train_epochs", "records.epochs"),
        together({"dataset_name": "records.path", "dataset_config": "records.subset", "dataset_train_split": "records.split"},
                 lambda r: records(r, "dataset_name", "dataset_train_split", "dataset_config"),
                 "a file, or a dataset of the hub"),
        together({"eval_strategy": "eval.0.every_steps", "eval_steps": "eval.0.every_steps",
                  "dataset_test_split": "records.held_out_split"}, _held_out, "the test split"),
    without("sequences that are longer are left out and counted; none is cut", "truncation_mode", "max_prompt_length"),
        without("tokens of the ends of turns come with the checkpoint", "eos_token", "pad_token", "chat_template_path"),
        without("nmoe packs whole sequences", "packing_strategy", "eval_packing"),
    )  # fmt: skip


_SFT_ROWS = (
    *_supervised(1),
    without("the format of records is recognised by their columns (docs/guides/data.md)", "dataset_text_field"),
    without("nmoe trains on the assistant's turns alone (docs/guides/sft.md); without this switch TRL trains on all tokens of "
        "messages and of plain text, the prompt's among them", "assistant_only_loss", neutral=True),
    without("nmoe trains on the completion alone (docs/guides/sft.md); with false TRL trains on the prompt, too",
        "completion_only_loss", neutral=True),
    without("nmoe's loss of SFT is the mean log-likelihood of tokens", "loss_type", neutral="nll"),
)  # fmt: skip

_PREFERENCES = {
    "sigmoid": "sigmoid",
    "hinge": "hinge",
    "ipo": "ipo",
    "robust": "robust",
    "sigmoid_norm": "sigmoid_norm",
}


def _preference(reading: Reading) -> Converted:
    given = reading["loss_type"]
    kinds = [str(one) for one in given] if isinstance(given, list) else [str(given)]
    given = reading["loss_weights"]
    weights = (
        [1.0] * len(kinds) if given is None else [float(one) for one in (given if isinstance(given, list) else [given])]
    )
    if len(weights) != len(kinds):
        raise ValueError("loss_weights has another length than loss_type")
    own = [(kind, weight) for kind, weight in zip(kinds, weights, strict=True) if kind != "sft"]
    loss, weight = own[0] if own else ("sigmoid", 1.0)
    found: dict[str, Any] = {
        "preference.beta": float(reading["beta"]),
        "preference.loss": _PREFERENCES.get(loss, "sigmoid"),
    }
    if not own:
        reading.differs(
            f"loss_type = {', '.join(kinds)}: nmoe has no loss of preferences without a comparison; sigmoid is written"
        )
    elif loss not in _PREFERENCES:
        reading.differs(f"loss_type = {loss}: nmoe has {', '.join(_PREFERENCES)}; sigmoid is written")
    if len(own) > 1:
        reading.differs(f"loss_type = {', '.join(kinds)}: nmoe has one loss of preferences, {found['preference.loss']}")
    if weight != 1:
        reading.differs(
            f"loss_weights: nmoe's loss of preferences has weight 1, TRL's {weight:g}; sft_weight is relative to it"
        )
    for kind, part in zip(kinds, weights, strict=True):
        if kind == "sft":
            found["preference.sft_weight"] = part / weight
    if found["preference.loss"] not in ("hinge", "ipo"):
        found["preference.label_smoothing"] = float(reading["label_smoothing"])
    return found


_DPO_ROWS = (
    *_supervised(2),
    together({"loss_type": "preference.loss", "loss_weights": "preference.sft_weight", "beta": "preference.beta",
              "label_smoothing": "preference.label_smoothing"}, _preference,
             "sigmoid, hinge, ipo, robust, sigmoid_norm; sft: preference.sft_weight"),
    without("the divergence of DPO is the reverse KL in nmoe", "f_divergence_type", neutral="reverse_kl"),
    without("settings of losses that nmoe does not have", "f_alpha_divergence_coef", "discopop_tau"),
    without("nmoe weighs no pairs and no lengths", "use_weighting", neutral=False),
    without("nmoe weighs no pairs and no lengths", "ld_alpha", "rpo_alpha", neutral=None),
    without("the reference stays the model that the run starts from", "sync_ref_model", neutral=False),
    without("the reference stays the model that the run starts from", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    without("nmoe computes the reference's log-probabilities in each step", "precompute_ref_log_probs",
        "precompute_ref_batch_size", "reference_free"),
    without("nmoe counts tokens of whole sequences", "max_completion_length"),
)  # fmt: skip

_REWARD_ROWS = (
    *_supervised(2),
    together({"center_rewards_coefficient": "reward_model.centering"},
             lambda r: {"reward_model.centering": float(r["center_rewards_coefficient"] or 0)}, "the same"),
)  # fmt: skip

_SHARED_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
    "gradient_checkpointing": True, "seed": 42, "save_steps": 500, "save_strategy": "steps", "eval_strategy": "no",
    "logging_steps": 10,
    "report_to": "none", "dataset_train_split": "train", "dataset_test_split": "test", "use_peft": False, "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05, "use_rslora": False, "label_smoothing_factor": 0.0, "dtype": "float32",
}  # fmt: skip

_ONLINE_DEFAULTS: dict[str, Any] = _SHARED_DEFAULTS | {
    "learning_rate": 1e-6, "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "repetition_penalty": 1.0, "num_iterations": 1,
    "epsilon": 0.2, "use_vllm": False, "vllm_mode": "colocate", "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
    "vllm_tensor_parallel_size": 1, "vllm_gpu_memory_utilization": 0.3, "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6,
}  # fmt: skip


def _program(
    name: str,
    command: str,
    rows: tuple[Row, ...],
    defaults: dict[str, Any],
    *modules: str,
    always: tuple[str, ...] = (),
) -> Program:
    source = f"trl 1.16.0, trl/trainer/{name}_config.py, and transformers' TrainingArguments"
    return Program(
        "TRL",
        f"trl {name}",
        command,
        source,
        (f"trl {name}", f"trl.scripts.{name}", *modules),
        rows,
        defaults,
        {},
        always,
    )


_DROPPED = (GROUPS_DROPPED.format(trainer="TRL"),)

PROGRAMS = (
    _program("grpo", "rl train", _GRPO_ROWS, _ONLINE_DEFAULTS | {
        "num_generations": 8, "beta": 0.0, "loss_type": "dapo", "scale_rewards": "group", "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize", "use_bias_correction_kl": True, "entropy_coef": 0.0,
        "top_entropy_quantile": 1.0,
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "use_adaptive_entropy": False,
    }, "grpo", "GRPO", always=_DROPPED),
    _program("rloo", "rl train", _RLOO_ROWS, _ONLINE_DEFAULTS | {"num_generations": 2, "beta": 0.05,
    "normalize_advantages": False}, "rloo", always=(
        *_DROPPED,
        "RLOO's loss has one ratio of a whole sequence, and sums over its tokens; nmoe's has one for each token, and divides "
        "by sampling.max_new_tokens",
    )),
    _program("sft", "sft", _SFT_ROWS, _SHARED_DEFAULTS | {"learning_rate": 2e-5, "max_length": 1024, "packing": False,
    "loss_type": "nll", "assistant_only_loss": False}, "sft"),
    _program("dpo", "dpo", _DPO_ROWS, _SHARED_DEFAULTS | {
        "learning_rate": 1e-6, "max_length": 1024, "loss_type": ["sigmoid"], "beta": 0.1, "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False, "sync_ref_model": False,
    }, "dpo"),
    _program("reward", "reward", _REWARD_ROWS, _SHARED_DEFAULTS | {"learning_rate": 1e-4, "max_length": 1024},
    "reward_modeling", "reward"),
)  # fmt: skip
