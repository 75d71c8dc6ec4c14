"""prime-rl: `uv run rl @ rl.toml`.

Keys and defaults are from packages/prime-rl-configs/src/prime_rl/configs at commit 004274e. A step has one update of batch_size
samples; an advantage is the reward less the group's mean (`GRPOAlgorithm`), and the loss is DPPO's with a pull back to the
sampler, over all tokens of the batch.
"""

from __future__ import annotations

from typing import Any

from nmoe.config.launches.concepts import lora, offload, optimizer
from nmoe.config.launches.rows import Converted, Program, Reading, Row, number, together, without
from nmoe.config.launches.shared import FILL_IN, at_home, end_of_schedule, grader, name_of

_ENV, _SAMPLING = "orchestrator.train.env.0", "orchestrator.train.sampling"
# What an environment sets counts over what all of them share.
_GROUP = tuple(f"{above}.{key}" for above in (_ENV, "orchestrator") for key in ("rollouts_per_example", "group_size"))
_LENGTH = tuple(
    f"{above}.{key}" for above in (f"{_ENV}.sampling", _SAMPLING) for key in ("max_tokens", "max_completion_tokens")
)
_HEAT = (f"{_ENV}.sampling.temperature", f"{_SAMPLING}.temperature")
_ALGORITHM = (
    *(f"{_ENV}.{key}" for key in ("algorithms", "algorithms.0.id")),
    *(f"orchestrator.{key}" for key in ("algorithms", "algorithms.0.id")),
)


def _first(reading: Reading, *keys: str) -> Any:
    """Returns the value of the first key that the launch gives, else the first default: shared keys stand for the parts' keys."""
    given = [key for key in keys if reading.has(key)] or [key for key in keys if reading[key] is not None]
    return reading[given[0]] if given else None


def _model(reading: Reading) -> Converted:
    keys = ("trainer.model.name", "orchestrator.model.name", "model.name")
    if not reading.has(*keys) or "$" in str(_first(reading, *keys)):
        reading.fill("model.path", "the checkpoint to start from")
    return {"model.path": at_home(_first(reading, *keys))}


def _batch(reading: Reading) -> Converted:
    group = max(1, int(_first(reading, *_GROUP)))
    found: dict[str, Any] = {"batch.group_size": group, "batch.updates_per_step": 1}
    if tokens := reading["orchestrator.token_batch_size"]:
        reading.fill("batch.prompts_per_step", f"token_batch_size = {tokens}: nmoe counts a step in prompts")
        return found
    if not (samples := reading.whole("orchestrator.batch_size")):
        reading.fill("batch.prompts_per_step", "the launch gives neither batch_size nor token_batch_size")
        return found
    if samples % group:
        reading.differs(
            f"{samples} samples of a step are no multiple of group_size = {group}; {samples // group} prompts are written"
        )
    return {**found, "batch.prompts_per_step": max(1, samples // group)}


def _microbatch(reading: Reading) -> Converted:
    return {
        "batch.tokens_per_microbatch": int(_first(reading, "trainer.model.seq_len", "orchestrator.seq_len", "seq_len"))
    }


def _schedule(reading: Reading) -> Converted:
    kind = str(reading["trainer.scheduler.type"])
    rate = reading.number("trainer.optim.lr", 1e-6)
    least = end_of_schedule(reading, kind, lambda: reading.number("trainer.scheduler.min_lr") / rate)
    if kind == "constant":
        return {"optimizer.min_lr_ratio": least}
    return {
        "optimizer.min_lr_ratio": least,
        "optimizer.warmup_steps": reading.whole("trainer.scheduler.warmup_steps", 10) or None,
    }


def _loss(reading: Reading) -> Converted:
    kind, low, high = str(reading["trainer.loss.type"]), "trainer.loss.dppo_mask_low", "trainer.loss.dppo_mask_high"
    if kind != "default":
        reading.differs(f"trainer.loss.type = {kind}: nmoe has no such loss; dppo is written")
    if (pull := reading.number("trainer.loss.kl_tau", 1e-3)) != 1e-3:
        reading.differs(
            f"trainer.loss.kl_tau = {pull:g}: nmoe's dppo pulls the policy back to the engine's probabilities by 0.001"
        )
    if (scale := reading.number("trainer.loss.adv_tau", 1.0)) != 1:
        reading.differs(f"trainer.loss.adv_tau = {scale:g}: nmoe does not scale advantages")
    return {
        "algorithm.loss": "dppo",
        "algorithm.clip_low": float(reading.number(low, 0.2)),
        "algorithm.clip_high": float(reading.number(high, 0.2)),
        "algorithm.aggregation": "token",
        "algorithm.kl_coef": 0.0,
    }


def _advantage(reading: Reading) -> Converted:
    given = _first(reading, *_ALGORITHM) or "grpo"
    several = given if isinstance(given, list) else [given]
    name = str(several[0])
    if name not in ("grpo", "max_rl"):
        reading.differs(f"algorithm {name}: nmoe has none like it; dr_grpo is written")
    if len(several) > 1:
        reading.differs(
            f"algorithms {', '.join(map(str, several[1:]))}: nmoe has one advantage estimator; {name} is written"
        )
    return {"algorithm.advantage": "maxrl" if name == "max_rl" else "dr_grpo"}


def _filtering(reading: Reading) -> Converted:
    """By default a batch loses the groups whose advantages are 0, as nmoe leaves them out, and no other is sampled instead."""
    refills = 0
    for slot in ("pre", "post"):
        for index in range(3):
            key = f"orchestrator.{slot}_batch_filters.{index}"
            if (kind := reading[f"{key}.type"]) is None:
                continue
            is_on = reading.yes(f"{key}.enforce") if reading.has(f"{key}.enforce") else kind == "zero_advantage"
            if kind != "zero_advantage":
                if is_on:
                    reading.differs(f"{kind} filter: nmoe keeps rollouts of any probability")
            elif slot == "pre" and is_on:
                refills = 8
                reading.differs(
                    "prime-rl samples until the batch is full of groups with a signal; nmoe refills at most batch.max_refills times"
                )
            elif not is_on and slot == "post":
                reading.differs(
                    "groups whose advantages are 0 stay in prime-rl's batch, and their tokens count in the mean"
                )
    return {"batch.max_refills": refills}


def _activations(reading: Reading) -> Converted:
    given = [reading[f"trainer.model.{key}"] for key in ("ac", "ac.mode", "ac.freq")]
    offloaded = [reading[f"trainer.model.{key}"] for key in ("ac_offloading", "ac_offloading.max_inflight_activations")]
    return {"model.checkpoint_activations": any(one is not None for one in (*given, *offloaded))}


def _asynchrony(reading: Reading) -> Converted:
    if not (most := reading.whole("orchestrator.max_off_policy_steps", 8)):
        return {}
    return {"async.max_staleness": most, "async.in_flight": "stale_kv"}


def _environment(reading: Reading) -> Converted:
    named = _first(reading, f"{_ENV}.taskset.id", f"{_ENV}.id")
    reading.fill(
        "environment.task_pool.path",
        f"the environment {named or 'of the launch'}: serve it as a source of groups (docs/ecosystem.md), or name problems",
    )
    own = {"environment.env_id": name_of(named) or "environment"}
    own |= {"environment.task_pool.type": "jsonl", "environment.task_pool.path": f"{FILL_IN}/train.jsonl"}
    return {**own, **grader(reading, [str(named)] if named else [])}


def _placement(reading: Reading) -> Converted:
    parallel = max(1, reading.whole("inference.parallel.tp", 1))
    found: dict[str, Any] = {"engine.kind": "vllm", "placement.tensor_parallel": parallel}
    if str(reading["deployment.type"]) == "multi_node":
        of_each = reading.whole("deployment.gpus_per_node", 8)
        training = of_each * reading.whole("deployment.num_train_nodes", 1)
        sampling = (
            of_each * reading.whole("deployment.num_infer_nodes", 1) * reading.whole("deployment.num_infer_replicas", 1)
        )
        found["placement.launcher"] = "ray"
    else:
        training, sampling = (
            reading.whole("deployment.num_train_gpus", 1),
            reading.whole("deployment.num_infer_gpus", 1),
        )
    return {**found, "placement.learner_gpus": training, "placement.engines": max(1, sampling // parallel)}


def _saving(reading: Reading) -> Converted:
    keep = _first(reading, "trainer.ckpt.keep_last", "ckpt.keep_last")
    step = _first(reading, "trainer.ckpt.resume_step", "ckpt.resume_step")
    if step not in (None, -1):
        reading.differs(f"ckpt.resume_step = {step}: nmoe resumes from the newest checkpoint of the run")
    return {
        "checkpoint.every_steps": _first(reading, "trainer.ckpt.interval", "ckpt.interval"),
        "checkpoint.keep": keep,
        "run.resume": None if step is None else "auto",
    }


def _run(reading: Reading) -> Converted:
    parent, _, last = at_home(reading["output_dir"]).rstrip("/").rpartition("/")
    return {"run.name": name_of(last) if reading.has("output_dir") else None, "run.directory": parent or None}


def _sinks(reading: Reading) -> Converted:
    if not reading.has("wandb", "wandb.project", "wandb.name"):
        return {}
    return {"sinks.to": ["wandb"], "sinks.project": reading["wandb.project"]}


_SEVERAL = "nmoe has one table for trainer, orchestrator and engine"

_ROWS: tuple[Row, ...] = (
    together(dict.fromkeys(("trainer.model.name", "orchestrator.model.name", "model.name"), "model.path"), _model, "the same"),
    together(dict.fromkeys((f"trainer.model.{key}" for key in ("ac", "ac.mode", "ac.freq", "ac_offloading",
             "ac_offloading.max_inflight_activations")), "model.checkpoint_activations"), _activations, "any of them: true"),
    offload("trainer.model.fsdp_cpu_offload", "trainer.model.optim_cpu_offload"),
    lora(*(f"trainer.model.lora.{key}" for key in ("rank", "alpha", "target_modules"))),
    together({"orchestrator.batch_size": "batch.prompts_per_step", "orchestrator.token_batch_size": "batch.prompts_per_step",
              **dict.fromkeys(_GROUP, "batch.group_size")}, _batch,
             "batch_size / group_size prompts, in one update"),
    together(dict.fromkeys(("trainer.model.seq_len", "orchestrator.seq_len", "seq_len"), "batch.tokens_per_microbatch"),
             _microbatch, "packed micro-batches of so many tokens"),
    together(dict.fromkeys(("trainer.max_steps", "orchestrator.max_steps", "max_steps"), "run.steps"),
             lambda r: {"run.steps": _first(r, "trainer.max_steps", "orchestrator.max_steps", "max_steps")}, "the same"),
    together(dict.fromkeys((f"orchestrator.{slot}_batch_filters.*" for slot in ("pre", "post")), "batch.max_refills"),
             _filtering, "0; 8 with a zero_advantage filter before the batch"),
    together(dict.fromkeys(_LENGTH, "sampling.max_new_tokens"), lambda r: {"sampling.max_new_tokens": _first(r, *_LENGTH)},
             "the same; without it up to the context's end"),
    together(dict.fromkeys(_HEAT, "sampling.temperature"), lambda r: {"sampling.temperature": float(_first(r, *_HEAT))},
            "the same"),
    together(dict.fromkeys(_ALGORITHM, "algorithm.advantage"), _advantage,
             "grpo: dr_grpo, as it does not divide; max_rl: maxrl"),
    together({"trainer.loss.type": ("algorithm.loss", "algorithm.aggregation"), "trainer.loss.dppo_mask_low": "algorithm.clip_low",
              "trainer.loss.dppo_mask_high": "algorithm.clip_high", "trainer.loss.kl_tau": "algorithm.loss",
              "trainer.loss.adv_tau": "algorithm.loss"}, _loss, "default: dppo, over all tokens"),
    optimizer("trainer.optim.type", "trainer.optim.mu", "prime-rl steers the routers by Muon, nmoe by AdamW"),
    number("trainer.optim.lr", "optimizer.learning_rate"),
    together({"trainer.scheduler.type": "optimizer.min_lr_ratio", "trainer.scheduler.min_lr": "optimizer.min_lr_ratio",
              "trainer.scheduler.warmup_steps": "optimizer.warmup_steps"}, _schedule,
             "linear warm-up, then a half cosine to min_lr / lr; constant: 1, without a warm-up"),
    number("trainer.optim.betas1", "optimizer.beta1"),
    number("trainer.optim.betas2", "optimizer.beta2"),
    number("trainer.optim.weight_decay", "optimizer.weight_decay"),
    number("trainer.optim.max_norm", "optimizer.max_grad_norm"),
    together({"orchestrator.max_off_policy_steps": "async.max_staleness"}, _asynchrony, "the same, in versions of the weights"),
    together({f"{_ENV}.id": "environment.env_id", f"{_ENV}.taskset.id": "environment.env_id"}, _environment,
             "an environment of verifiers, to be named in nmoe's way"),
    together({"deployment.type": "placement.launcher", "deployment.num_train_gpus": "placement.learner_gpus",
              "deployment.num_infer_gpus": "placement.engines", "deployment.num_train_nodes": "placement.learner_gpus",
              "deployment.num_infer_nodes": "placement.engines", "deployment.num_infer_replicas": "placement.engines",
              "deployment.gpus_per_node": ("placement.learner_gpus", "placement.engines"),
              "inference.parallel.tp": "placement.tensor_parallel"}, _placement, "vLLM on its own GPUs"),
    together({"ckpt.interval": "checkpoint.every_steps", "trainer.ckpt.interval": "checkpoint.every_steps",
              "ckpt.keep_last": "checkpoint.keep", "trainer.ckpt.keep_last": "checkpoint.keep", "ckpt.resume_step": "run.resume",
              "trainer.ckpt.resume_step": "run.resume"}, _saving, "the same"),
    together({"output_dir": "run.directory"}, _run, "the last part of the path is the run's name"),
    together({"wandb": "sinks.to", "wandb.project": "sinks.project", "wandb.name": "sinks.to"}, _sinks, "wandb"),
    # Without counterpart.
    without("the file whose keys are read", "@"),
    without("nmoe's adapters have no dropout", "trainer.model.lora.dropout", neutral=0.0),
    without("nmoe adapts projections alone", "trainer.model.lora.*"),
    without("the schedule ends with the run, or by optimizer.schedule_steps", "trainer.scheduler.decay_steps"),
    without("nmoe keeps as many samples under way as async.max_staleness allows", "orchestrator.oversampling_factor",
            "orchestrator.max_inflight_rollouts"),
    without("nmoe samples by temperature, top_p and top_k alone", f"{_SAMPLING}.extra_body*"),
    without("nmoe mixes pools by [[environment.task_pool.sources]]", "orchestrator.train.env*", "orchestrator.env*",
            "orchestrator.train.max_retries"),
    without("write an [[eval]] with nmoe's environment", "orchestrator.eval*"),
    without("nmoe trains in one way of sharding; the numbers are the same", "trainer.model.*", "trainer.matmul_precision",
            "trainer.dist_timeout_seconds", "trainer.gc*", "trainer.max_concurrent_runs", "trainer.enable_router_replay"),
    without("engine.weights chooses how weights are published (docs/guides/engines.md)", "weight_broadcast*",
            "trainer.weight_broadcast*", "orchestrator.weight_broadcast*", "trainer.rollout_transport*",
            "orchestrator.rollout_transport*"),
    without("an option of the engine's own; engine.args passes options of its command line on", "inference", "inference.*"),
    without(_SEVERAL, "trainer", "trainer.*", "orchestrator", "orchestrator.*", "deployment.*", "model.*", "tokenizer.*", "ckpt",
            "ckpt.*", "wandb.*", "log.*", "slurm*", "bench", "clean_output_dir", "env_server_base_port", "dry_run",
            "experimental*"),
)  # fmt: skip

RL = Program(
    trainer="prime-rl", name="prime-rl", command="rl train", rows=_ROWS,
    source="prime-rl at commit 004274e, packages/prime-rl-configs/src/prime_rl/configs",
    modules=("prime_rl", "prime-rl rl"),
    defaults={
        "model.name": "Qwen/Qwen3-0.6B", "trainer.model.fsdp_cpu_offload": False, "trainer.model.optim_cpu_offload": False,
        "trainer.model.lora.alpha": 32.0, "orchestrator.group_size": 1, "trainer.model.seq_len": 2048,
        f"{_SAMPLING}.temperature": 1.0,
        "trainer.loss.type": "default", "trainer.loss.dppo_mask_low": 0.2, "trainer.loss.dppo_mask_high": 0.2,
        "trainer.loss.kl_tau": 1e-3, "trainer.loss.adv_tau": 1.0, "trainer.optim.lr": 1e-6, "trainer.optim.betas1": 0.9,
        "trainer.optim.betas2": 0.999, "trainer.optim.weight_decay": 0.01, "trainer.optim.max_norm": 1.0,
        "trainer.scheduler.type": "constant", "trainer.scheduler.min_lr": 0.0, "trainer.scheduler.warmup_steps": 10,
        "orchestrator.max_off_policy_steps": 8, "deployment.num_train_gpus": 1, "deployment.num_infer_gpus": 1,
        "deployment.type": "single_node", "deployment.gpus_per_node": 8, "output_dir": "outputs", "wandb.project": "prime-rl",
            "trainer.optim.type": "adamw", "trainer.optim.mu": 0.95, "trainer.model.lora.dropout": 0.0,
    },
    # Older spellings, and tasksets in a table `env`.
    aliases={
        "orchestrator.env.0.id": f"{_ENV}.id", f"{_ENV}.env.taskset.id": f"{_ENV}.taskset.id",
        **{f"orchestrator.sampling.{key}": f"{_SAMPLING}.{key}" for key in ("temperature", "max_tokens", "max_completion_tokens")},
    },
)  # fmt: skip

PROGRAMS = (RL,)
