"""Translates keys, values and commands of TRL, verl and OpenRLHF, so that an error can suggest nmoe's name.

A key is looked up by its last parts, longest match first, in lower case and with underscores: verl's `actor_rollout_ref.rollout.n`
by `rollout.n`. Where several keys of nmoe are listed for one, they belong to different commands: the first that the command has is
suggested.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence

_STEPS = ("run.steps",)
_PASSES = ("run.episodes", "records.epochs")
_KL = ("algorithm.kl_coef", "preference.beta")
_PROMPTS = ("batch.prompts_per_step", "records.tokens_per_step", "data.tokens_per_step", "verifier.tokens_per_step")
_MICRO = ("batch.tokens_per_microbatch",)
_DATA = (
    "environment.task_pool.path",
    "records.path",
    "data.documents",
    "verifier.prm_source",
    "selfplay.problem_source",
)
_QUESTION = ("environment.task_pool.problem_field", "records.columns", "selfplay.problem_field")
_ANSWER = ("environment.task_pool.answer_field", "records.columns")
_COMPLETION = ("sampling.max_new_tokens",)
_PROMPT = ("environment.budget.prompt_tokens",)
_CONTEXT = ("model.context_tokens",)
_CORRECTION = ("algorithm.correction",)
_RATE = ("optimizer.learning_rate",)
_REWARDS = ("environment.rewards",)
_EVERY = ("eval.0.every_steps",)

KEYS: Mapping[str, Sequence[str]] = {
    # the size of a step
    **dict.fromkeys(("num_generations", "rollout.n", "n_samples_per_prompt", "n_samples", "num_samples"), ("batch.group_size",)),
    **dict.fromkeys(("train_batch_size", "rollout_batch_size", "per_device_train_batch_size", "batch_size"), _PROMPTS),
    "generation_batch_size": _PROMPTS,
    **dict.fromkeys(("gradient_accumulation_steps", "micro_train_batch_size", "micro_batch_size"), _MICRO),
    **dict.fromkeys(("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu"), _MICRO),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size", "steps_per_generation"), ("batch.updates_per_step",)),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "max_epochs"), ("batch.passes_per_step",)),
    **dict.fromkeys(("dynamic_filtering", "filter_groups", "dynamic_sampling"), ("batch.max_refills",)),
    # how long
    **dict.fromkeys(("max_steps", "total_training_steps", "num_steps", "training_steps", "iterations"), _STEPS),
    **dict.fromkeys(("num_train_epochs", "total_epochs", "num_episodes", "epochs", "num_epochs"), _PASSES),
    # the distribution that is sampled from
    **dict.fromkeys(("max_completion_length", "max_response_length", "response_length", "generate_max_len"), _COMPLETION),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "response_max_len"), _COMPLETION),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len", "prompt_length"), _PROMPT),
    **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "max_len", "model_max_length"), _CONTEXT),
    **dict.fromkeys(("gpu_memory_utilization", "vllm_gpu_memory_utilization"), ("engine.cache_mb",)),
    "max_num_seqs": ("engine.max_sequences",),
    "vllm_sync_with_ray": ("engine.weights",),
    "vllm_sync_backend": ("engine.group_backend",),
    # the algorithm
    **dict.fromkeys(("beta", "kl_beta", "kl_loss_coef", "init_kl_coef", "kl_coefficient", "kl_weight"), _KL),
    **dict.fromkeys(("use_kl_loss", "use_kl_in_reward"), ("algorithm.kl_in",)),
    **dict.fromkeys(("kl_loss_type", "kl_penalty", "kl_type"), ("algorithm.kl_estimator",)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "scale_rewards"), ("algorithm.advantage",)),
    "norm_adv_by_std_in_grpo": ("algorithm.advantage",),
    **dict.fromkeys(("loss_type", "loss_mode", "policy_loss", "policy_loss_type"), ("algorithm.loss", "preference.loss")),
    "importance_sampling_level": ("algorithm.loss",),
    **dict.fromkeys(("loss_agg_mode", "loss_aggregation", "token_level_loss"), ("algorithm.aggregation",)),
    **dict.fromkeys(("epsilon", "clip_ratio", "clip_ratio_low", "eps_clip", "cliprange", "clip_eps"), ("algorithm.clip_low",)),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high"), ("algorithm.clip_high",)),
    **dict.fromkeys(("delta", "clip_ratio_c", "dual_clip"), ("algorithm.dual_clip_bound",)),
    **dict.fromkeys(("entropy_coeff", "entropy_loss_coef", "ent_coef"), ("algorithm.entropy_coef",)),
    **dict.fromkeys(("vllm_importance_sampling_correction", "use_tis", "rollout_is", "enable_vllm_is_correction"), _CORRECTION),
    **dict.fromkeys(("vllm_importance_sampling_cap", "tis_imp_ratio_cap", "rollout_is_threshold"), ("algorithm.correction_cap",)),
    "mask_truncated_completions": ("algorithm.mask_truncated",),
    **dict.fromkeys(("overlong_buffer_len", "overlong_buffer.len", "soft_overlong"), ("algorithm.overlong_buffer",)),
    **dict.fromkeys(("ref_model_sync_steps", "ref_update_interval"), ("algorithm.reference_every_steps",)),
    **dict.fromkeys(("gae_lambda", "lam", "lambd", "gae_lam"), ("critic.trace_decay",)),
    **dict.fromkeys(("critic_learning_rate", "critic_lr", "critic.optim.lr"), ("critic.learning_rate",)),
    **dict.fromkeys(("vf_coef", "value_loss_coef"), ("critic.coef",)),
    **dict.fromkeys(("value_clip", "cliprange_value", "vf_clip"), ("critic.clip",)),
    **dict.fromkeys(("critic_pretrain", "critic.model.path"), ("critic.path",)),
    **dict.fromkeys(("critic_warmup", "freezing_actor_steps"), ("critic.warmup_steps",)),
    # the optimizer
    **dict.fromkeys(("lr", "actor_learning_rate", "actor_lr", "max_lr", "peak_lr"), _RATE),
    **dict.fromkeys(("lr_warmup_ratio", "lr_warmup_steps_ratio"), ("optimizer.warmup_ratio",)),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps", "warmup"), ("optimizer.warmup_steps",)),
    "min_lr": ("optimizer.min_lr_ratio",),
    **dict.fromkeys(("l2", "wd"), ("optimizer.weight_decay",)),
    "adam_beta1": ("optimizer.beta1",),
    "adam_beta2": ("optimizer.beta2",),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), ("optimizer.eps",)),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_norm", "gradient_clipping"), ("optimizer.max_grad_norm",)),
    # model and adapter
    **dict.fromkeys(("model_name_or_path", "model_name", "pretrain", "ref_model", "actor_rollout_ref.model.path"), ("model.path",)),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"), ("model.tokenizer",)),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype", "param_dtype", "mixed_precision"), ("model.precision",)),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing"), ("model.checkpoint_activations",)),
    **dict.fromkeys(("torch_compile", "use_torch_compile"), ("model.compile",)),
    **dict.fromkeys(("use_cpu", "device_map"), ("model.device",)),
    **dict.fromkeys(("router_aux_loss_coef", "aux_loss_coef"), ("model.router_aux_loss_coef",)),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), ("lora.rank",)),
    "lora_alpha": ("lora.alpha",),
    **dict.fromkeys(("target_modules", "lora_target_modules"), ("lora.targets",)),
    "use_rslora": ("lora.rslora",),
    **dict.fromkeys(("use_peft", "peft_config", "use_lora"), ("lora",)),
    # data and rewards
    **dict.fromkeys(("dataset_name", "train_files", "prompt_data", "dataset", "train_dataset", "data_path", "input_data"), _DATA),
    **dict.fromkeys(("input_key", "prompt_key", "prompt_column"), _QUESTION),
    **dict.fromkeys(("label_key", "answer_key", "answer_column", "ground_truth_key"), _ANSWER),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), ("environment.task_pool.subset", "records.subset")),
    **dict.fromkeys(("dataset_train_split", "prompt_split"), ("environment.task_pool.split", "records.split")),
    **dict.fromkeys(("max_samples", "max_train_samples"), ("environment.task_pool.max_examples",)),
    **dict.fromkeys(("reward_funcs", "reward_function", "custom_reward_function", "reward_weights"), _REWARDS),
    **dict.fromkeys(("remote_rm_url", "reward", "rewards", "reward_model.path", "reward_model.model.path"), _REWARDS),
    **dict.fromkeys(("system_prompt", "system_message"), ("environment.system",)),
    **dict.fromkeys(("eval_dataset", "val_files", "eval_data", "eval_files"), ("records.held_out_path", "eval.0.environment")),
    # the run
    **dict.fromkeys(("output_dir", "save_path", "default_local_dir", "ckpt_path", "log_dir", "logging_dir"), ("run.directory",)),
    **dict.fromkeys(("run_name", "experiment_name", "wandb_run_name", "exp_name"), ("run.name",)),
    **dict.fromkeys(("project_name", "wandb_project"), ("sinks.project",)),
    **dict.fromkeys(("report_to", "logger", "use_wandb", "use_tensorboard", "wandb", "tensorboard"), ("sinks.to",)),
    **dict.fromkeys(("resume_from_checkpoint", "resume_mode", "load_checkpoint", "resume_from"), ("run.resume",)),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), ("checkpoint.every_steps",)),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep", "max_ckpt_num"), ("checkpoint.keep",)),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_freq", "eval_interval", "eval_strategy"), _EVERY),
    **dict.fromkeys(("num_threads", "omp_num_threads"), ("run.threads",)),
    **dict.fromkeys(("log_completions", "num_completions_to_print"), ("run.show_sample_every",)),
}  # fmt: skip

_SCHEDULE = "the learning rate rises linearly and falls as a cosine to optimizer.min_lr_ratio of its peak"

WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(("use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port"), "a run samples with its own engine"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "warmup_style"), _SCHEDULE),
    **dict.fromkeys(("reward_model.enable", "reward_model.enabled"), "name the model in [[rewards]], with type = \"reward_model\""),
    **dict.fromkeys(("n_gpus_per_node", "nnodes", "actor_num_gpus_per_node"), "torchrun starts one process for each GPU"),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory"), "a run reads its data in its own process"),
}  # fmt: skip
"""Keys of other frameworks without a counterpart in nmoe, each with an explanation of nmoe's behaviour."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "algorithm.advantage": {
        "group_norm": "grpo",
        "dapo": "grpo",
        "ppo": "gae",
        "dr.grpo": "dr_grpo",
        "drgrpo": "dr_grpo",
        "grpo_no_std": "dr_grpo",
        "reinforce": "reinforce_pp",
        "reinforce++": "reinforce_pp",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_baseline": "dr_grpo",
    },
    "algorithm.loss": {
        **dict.fromkeys(("ppo", "grpo", "dapo", "dr_grpo", "bnpo", "vanilla", "pg", "reinforce"), "clip"),
        "sequence": "gspo",
    },
    "algorithm.aggregation": {
        **dict.fromkeys(("token-mean", "dapo", "bnpo", "token_mean", "batch"), "token"),
        **dict.fromkeys(("seq-mean-token-mean", "seq_mean", "grpo", "mean"), "sequence"),
        **dict.fromkeys(("seq-mean-token-sum", "seq-mean-token-sum-norm", "dr_grpo"), "constant"),
    },
    "algorithm.kl_estimator": {**dict.fromkeys(("low_var_kl", "kl_low_var"), "k3"), "mse": "k2", "kl": "k1"},
    "algorithm.correction": {"icepop": "mask", "truncate": "tis", "token": "tis", "sequence": "sequence_mask"},
    "preference.loss": {"dpo": "sigmoid"},
    "model.precision": {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"},
    "model.device": {"gpu": "cuda", "mps": "cpu"},
    "sinks.to": {"tb": "tensorboard", "wb": "wandb"},
}
"""For each of nmoe's keys: values that other frameworks use, in lower case, and nmoe's value for each."""

COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "grpo", "ppo", "rloo", "gspo", "dapo", "rlhf", "rlvr", "train_rl"), "rl train"),
    **dict.fromkeys(("finetune", "fine-tune", "train_sft", "instruct"), "sft"),
    **dict.fromkeys(("ipo", "orpo", "simpo", "preference", "train_dpo"), "dpo"),
    **dict.fromkeys(("rm", "reward-model", "reward_model", "train_reward", "train_rm"), "reward"),
    **dict.fromkeys(("prm", "process-reward"), "verifier"),
    **dict.fromkeys(("evaluate", "evaluation", "benchmark", "bench", "test"), "eval"),
    **dict.fromkeys(("generate", "serve", "infer", "inference", "repl", "run"), "chat"),
    **dict.fromkeys(("check", "validate", "lint"), "preflight"),
    **{name: f"runs {name}" for name in ("samples", "show", "compare", "diff", "sync", "table", "list")},
    **dict.fromkeys(("ls", "status", "ps"), "runs list"),
    **{name: f"data {name}" for name in ("download", "prepare", "pairs", "solve-rates")},
    **dict.fromkeys(("environment", "environments"), "env list"),
    **dict.fromkeys(("init", "new", "example", "examples", "presets", "configs"), "config list"),
    **dict.fromkeys(("convert", "merge", "save", "push"), "export"),
    **dict.fromkeys(("quickstart", "demo", "start"), "speedrun"),
}  # fmt: skip
"""Names that users may try for a command, each with nmoe's command."""


def keys_meant(path: Sequence[str]) -> Sequence[str]:
    """Returns nmoe's keys for another framework's key, in order of preference: the first that the command has applies. Empty if
    unknown."""
    return next((KEYS[name] for name in _names(path) if name in KEYS), ())


def no_counterpart(path: Sequence[str]) -> str | None:
    """Returns the explanation for another framework's key that has no counterpart in nmoe; None for any other key."""
    return next((WITHOUT[name] for name in _names(path) if name in WITHOUT), None)


def _names(path: Sequence[str]) -> Iterator[str]:
    """Returns the suffixes of a key, longest first: `a.b.c`, `b.c`, `c`."""
    names = [name.lower().replace("-", "_") for part in path for name in part.split(".")]
    return (".".join(names[at:]) for at in range(len(names)))


def value_meant(key: str, value: str) -> str | None:
    """Returns nmoe's value for another framework's: "k3" for "low_var_kl" of `algorithm.kl_estimator`; None if none is known."""
    return VALUES.get(key, {}).get(value.lower())


def closest(value: str, choices: Sequence[str], key: str = "") -> str | None:
    """Returns the most likely intended choice: nmoe's name for another framework's value, else the closest spelling, regardless
    of case. None if no choice is similar."""
    plain = value.lower().replace("-", "_")
    same = {choice.lower().replace("-", "_"): choice for choice in choices}
    if (meant := value_meant(key, value)) in choices:
        return meant
    alike = difflib.get_close_matches(plain, list(same), n=1)
    return same[alike[0]] if alike else None


def table_leaves(path: tuple[str | int, ...], value: object) -> Iterator[tuple[str | int, ...]]:
    """Yields the key paths of all values in a nested table: `("actor", "optim", "lr")` for `{"optim": {"lr": 1}}` at
    `("actor",)`."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from table_leaves((*path, str(key)), one)
    else:
        yield path
