"""Translates keys, values and commands of other trainers, so that an error can suggest nmoe's name.

A key is looked up by its last parts, longest match first, in lower case and with underscores: verl's `actor_rollout_ref.rollout.n`
by `rollout.n`. The keys come from `nmoe config import` (nmoe/config/launches), with the spellings below. Where several keys of
nmoe are listed for one, they belong to different commands: the first that the command has is suggested.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

SPELLINGS: Mapping[str, Sequence[str]] = {
    "batch.prompts_per_step": ("train_batch_size", "batch_size", "rollout_batch_size"),
    "batch.group_size": ("n_samples", "num_samples"),
    "batch.tokens_per_microbatch": ("gradient_accumulation_steps", "micro_batch_size"),
    "batch.updates_per_step": ("mini_batch_size",),
    "batch.max_refills": ("filter_groups", "dynamic_sampling"),
    "run.steps": ("num_steps", "training_steps", "iterations"),
    "run.episodes": ("epochs", "num_epochs"),
    "run.directory": ("log_dir", "logging_dir", "default_local_dir"),
    "run.name": ("exp_name",),
    "run.resume": ("resume_from",),
    "run.threads": ("num_threads", "omp_num_threads"),
    "run.show_sample_every": ("log_completions", "num_completions_to_print"),
    "sampling.max_new_tokens": ("max_tokens", "response_max_len"),
    "environment.budget.prompt_tokens": ("prompt_length",),
    "model.context_tokens": ("max_length", "max_seq_length", "max_seq_len", "max_len", "model_max_length"),
    "engine.cache_mb": ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    "engine.weights": ("vllm_sync_with_ray",),
    "engine.group_backend": ("vllm_sync_backend",),
    "algorithm.kl_coef": ("kl_beta", "kl_coefficient", "kl_weight"),
    "algorithm.kl_estimator": ("kl_type",),
    "algorithm.loss": ("policy_loss",),
    "algorithm.aggregation": ("loss_aggregation", "token_level_loss"),
    "algorithm.clip_low": ("cliprange", "clip_eps"),
    "algorithm.entropy_coef": ("ent_coef",),
    "algorithm.overlong_buffer": ("overlong_buffer.len", "soft_overlong"),
    "algorithm.reference_every_steps": ("ref_update_interval",),
    "critic.trace_decay": ("gae_lambda", "lam", "gae_lam"),
    "critic.learning_rate": ("critic_lr",),
    "critic.coef": ("vf_coef", "value_loss_coef"),
    "critic.clip": ("vf_clip",),
    "optimizer.learning_rate": ("lr", "actor_lr", "max_lr", "peak_lr"),
    "optimizer.warmup_steps": ("warmup",),
    "optimizer.min_lr_ratio": ("min_lr",),
    "optimizer.weight_decay": ("wd",),
    "optimizer.eps": ("adam_eps",),
    "optimizer.max_grad_norm": ("gradient_clipping",),
    "model.path": ("model_name", "ref_model"),
    "model.tokenizer": ("tokenizer_name", "tokenizer_name_or_path"),
    "model.precision": ("mixed_precision", "param_dtype"),
    "model.compile": ("torch_compile", "use_torch_compile"),
    "model.device": ("device_map",),
    "lora": ("use_lora", "peft_config"),
    "lora.rank": ("r",),
    "environment.task_pool.path": ("dataset", "train_dataset", "data_path", "input_data"),
    "environment.task_pool.problem_field": ("prompt_key", "prompt_column"),
    "environment.task_pool.answer_field": ("answer_key", "answer_column", "ground_truth_key"),
    "environment.task_pool.subset": ("dataset_config_name",),
    "environment.task_pool.max_examples": ("max_train_samples",),
    "environment.rewards": (
        "reward", "rewards", "reward_function", "custom_reward_function", "reward_model.path",
    ),
    "environment.system": ("system_prompt", "system_message"),
    "records.held_out_path": ("eval_dataset", "val_files", "eval_data", "eval_files"),
    "sinks.to": ("logger", "wandb", "tensorboard"),
    "sinks.project": ("project_name",),
    "checkpoint.every_steps": ("save_interval",),
    "eval.0.every_steps": ("eval_freq", "eval_interval"),
}  # fmt: skip
"""For each of nmoe's keys: spellings that `nmoe config import` does not have, and spellings that several trainers use
for different things, each under the most usual one."""

SIMILAR: Mapping[str, Sequence[str]] = {
    "batch.prompts_per_step": ("records.tokens_per_step", "data.tokens_per_step", "verifier.tokens_per_step"),
    "run.episodes": ("records.epochs",),
    "algorithm.kl_coef": ("preference.beta",),
    "algorithm.loss": ("preference.loss",),
    "environment.task_pool.path": (
        "records.path", "data.documents", "verifier.prm_source", "selfplay.problem_source",
    ),
    "environment.task_pool.problem_field": ("records.columns", "selfplay.problem_field"),
    "environment.task_pool.answer_field": ("records.columns",),
    "environment.task_pool.subset": ("records.subset",),
    "environment.task_pool.split": ("records.split",),
    "records.held_out_path": ("eval.0.environment",),
}  # fmt: skip
"""For keys of nmoe that some of its commands lack: their keys for the same."""

_SCHEDULE = "the learning rate rises linearly and falls as a cosine to optimizer.min_lr_ratio of its peak"

WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "warmup_style"), _SCHEDULE),
    **dict.fromkeys(("reward_model.enable", "reward_model.enabled"), "name the model in [[rewards]], with type = \"reward_model\""),
}  # fmt: skip
"""Keys of other trainers whose explanation says more than a key of nmoe."""

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
        **dict.fromkeys(("reinforce_baseline", "reinforce_plus_plus_baseline"), "dr_grpo"),
        **dict.fromkeys(("grpo_vectorized", "gdpo"), "grpo"),
        "rloo_vectorized": "rloo",
    },
    "algorithm.loss": {
        **dict.fromkeys(("ppo", "grpo", "dapo", "dr_grpo", "bnpo", "vanilla", "regular", "pg", "reinforce"), "clip"),
        "sequence": "gspo",
    },
    "algorithm.aggregation": {
        **dict.fromkeys(("token-mean", "dapo", "bnpo", "token_mean", "token_mean_legacy", "batch"), "token"),
        **dict.fromkeys(("seq-mean-token-mean", "sequence_mean", "seq_mean", "grpo", "mean"), "sequence"),
        **dict.fromkeys(
            ("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq_mean_token_sum_norm", "dr_grpo"), "constant"
        ),
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
    """Returns nmoe's keys for another trainer's key, in order of preference: the first that the command has applies. Empty if
    unknown."""
    return next((found for name in _names(path) if (found := _index()[0].get(name))), ())


def no_counterpart(path: Sequence[str]) -> str | None:
    """Returns the explanation for another trainer's key that has no counterpart in nmoe; None for any other key."""
    return next((found for name in _names(path) if (found := _index()[1].get(name))), None)


@cache
def _index() -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Returns nmoe's keys by spelling, and the explanations by spelling: from the tables above, then from `nmoe config import`."""
    from nmoe.config.launches.command import PROGRAMS  # which needs the tables, whose messages need this module

    keys: dict[str, list[str]] = {}
    reasons = dict(WITHOUT)

    def add(name: str, ours: Sequence[str], reason: str = "") -> None:
        found = keys.setdefault(name, [])
        found += [key for one in ours for key in (one, *SIMILAR.get(one, ())) if key not in found]
        if reason:
            reasons.setdefault(name, reason)

    for ours, spellings in SPELLINGS.items():
        for name in spellings:
            add(name, [ours])
    for program in PROGRAMS:
        spelled = [*((old, new) for old, new in program.aliases.items())]
        spelled += [(name, key) for row in program.rows for key in row.keys for name in _endings(key)]
        for name, key in spelled:
            if "*" not in key and (row := program.row_of(key)) is not None:
                add(name.lower(), row.keys.get(key, ()), "" if row.convert else row.text)
    return {name: tuple(found) for name, found in keys.items() if name not in WITHOUT}, reasons


def _endings(key: str) -> Iterator[str]:
    """Yields the endings of a dotted key by which it is known: not its last part alone if that is a single word, such as `path`."""
    parts = key.split(".")
    for at in range(len(parts)):
        if at == 0 or at < len(parts) - 1 or "_" in parts[-1]:
            yield ".".join(parts[at:])


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
