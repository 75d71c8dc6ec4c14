"""Conversions that the catalogues of several trainers share: datasets, schedules, names, evaluation, KL."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from nmoe.config.launches.rows import Converted, Reading

FILL_IN = "FILL_IN"
"""What stands in the TOML where the launch does not say what nmoe needs."""

_FILES = {".jsonl": "jsonl", ".parquet": "parquet", ".csv": "csv"}
_GENERIC = {"json": "json", "jsonl": "json", "parquet": "parquet", "csv": "csv"}

GROUPS_DROPPED = (
    "groups whose rewards are all equal: nmoe leaves them out of the update; {trainer} keeps them, where their advantages "
    "are 0 and "
    "their tokens count in the mean of the loss"
)
EVALUATED = "evaluation: nmoe asks the same eval.problems (200) each time; {trainer} asks all of the dataset"
LINEAR = "the learning rate falls as a half cosine to the same final rate, not as a line"


def name_of(value: Any) -> str | None:
    """Returns a text as the name of a run or an environment: letters, digits and . _ + = -."""
    if value is None:
        return None
    plain = re.sub(r"[^\w.+=-]+", "_", str(value)).strip("_.")
    return plain or None


def at_home(path: Any) -> str:
    """Returns a path with the home directory instead of a leading `~`, which trainers expand themselves."""
    return os.path.expanduser(str(path))


def pool(
    reading: Reading, prefix: str, paths: Any, split: Any = None, subset: Any = None, limit: Any = None
) -> dict[str, Any]:
    """Returns the keys of a task pool at `prefix` (`environment.task_pool`) for a dataset: a file, several, or a hub name."""
    several = [
        str(one)
        for one in (paths if isinstance(paths, list | tuple) else str(paths or "").split(","))
        if str(one).strip()
    ]
    several = [at_home(one.strip()) for one in several]
    if not several:
        reading.fill(f"{prefix}.path", "the problems to train on, which the launch does not name")
        return {f"{prefix}.type": "jsonl", f"{prefix}.path": f"{FILL_IN}/train.jsonl"}
    found: dict[str, Any] = {}
    suffix = PurePosixPath(several[0]).suffix
    if (
        len(several) > 1
        and all(PurePosixPath(one).suffix == suffix for one in several)
        and suffix in (*_FILES, ".json")
    ):
        kind = _GENERIC[suffix.removeprefix(".")]
        found = {f"{prefix}.type": "hf", f"{prefix}.dataset": kind, f"{prefix}.data_files": several}
    elif suffix in _FILES:
        found = {f"{prefix}.type": _FILES[suffix], f"{prefix}.path": several[0]}
    elif suffix == ".json":
        found = {f"{prefix}.type": "hf", f"{prefix}.dataset": "json", f"{prefix}.data_files": several}
    else:
        found = {
            f"{prefix}.type": "hf",
            f"{prefix}.dataset": several[0],
            f"{prefix}.split": split or "train",
            f"{prefix}.subset": subset,
        }
        if len(several) > 1:
            reading.differs(
                f"{len(several)} datasets: only the first is written; mix the others by [[{prefix}.sources]] "
                f"(docs/guides/environments.md)"
            )
    if isinstance(limit, int | float) and 0 < limit < 10**7:
        found[f"{prefix}.max_examples"] = int(limit)
    if "$" in "".join(several):
        reading.fill(
            f"{prefix}.{'path' if f'{prefix}.path' in found else 'dataset'}", "a variable that the script does not set"
        )
    return found


def records(reading: Reading, paths: Any, split: Any = None, subset: Any = None, limit: Any = None) -> dict[str, Any]:
    """Returns the keys of [records] for a dataset of examples."""
    several = [
        at_home(str(one).strip())
        for one in (paths if isinstance(paths, list | tuple) else str(paths or "").split(","))
        if str(one).strip()
    ]
    if not several:
        reading.fill("records.path", "the examples to learn from, which the launch does not name")
        return {"records.path": f"{FILL_IN}/train.jsonl"}
    suffix = PurePosixPath(several[0]).suffix.removeprefix(".")
    if len(several) > 1 and suffix in _GENERIC:
        return {"records.path": _GENERIC[suffix], "records.data_files": several}
    if len(several) > 1:
        reading.differs(
            f"{len(several)} datasets: only the first is written; mix the others by [[records.sources]] (docs/guides/data.md)"
        )
    path = several[0]
    if isinstance(limit, int | float) and 0 < limit < 10**6:
        path += f"@[:{int(limit)}]"
    is_file = suffix in _GENERIC
    return {
        "records.path": path,
        "records.split": None if is_file else split,
        "records.subset": None if is_file else subset,
    }


def warmup_of_run(reading: Reading, steps: int, of_each: int) -> int:
    """Returns a warm-up in steps of the run, each of which has `of_each` steps of the optimizer, rounded up."""
    if steps % of_each:
        reading.differs(
            f"{steps} steps of warm-up are no multiple of the {of_each} optimizer steps that a step of nmoe has; rounded up"
        )
    return math.ceil(steps / of_each)


def schedule(
    reading: Reading, name: Any, min_ratio: float | None = None, warmup_steps: int = 0, warmup_ratio: float = 0.0
) -> Converted:
    """Returns nmoe's schedule (linear warm-up, then a half cosine to a share of the peak) for one by its name in transformers."""
    kind = str(name or "constant").lower()
    ends = {
        "constant": 1.0,
        "constant_with_warmup": 1.0,
        "cosine": 0.0 if min_ratio is None else min_ratio,
        "cosine_with_min_lr": 0.1 if min_ratio is None else min_ratio,
        "cosine_warmup_with_min_lr": 0.1 if min_ratio is None else min_ratio,
        "linear": 0.0,
    }
    if kind == "linear":
        reading.differs(f"schedule linear: {LINEAR}")
    elif kind not in ends:
        reading.differs(f"schedule {kind}: nmoe has a linear warm-up and a half cosine; this one ends at 0")
    found: dict[str, Any] = {"optimizer.min_lr_ratio": float(ends.get(kind, 0.0))}
    if warmup_steps > 0:
        found["optimizer.warmup_steps"] = int(warmup_steps)
    elif warmup_ratio > 0:
        found["optimizer.warmup_ratio"] = float(warmup_ratio)
    return found


def kl(coef: Any, where: str, estimator: str | None, weighted: bool) -> Converted:
    """Returns the keys of the KL penalty; none but the coefficient if it is 0."""
    if not coef:
        return {"algorithm.kl_coef": 0.0}
    found: dict[str, Any] = {
        "algorithm.kl_coef": float(coef),
        "algorithm.kl_in": where,
        "algorithm.kl_estimator": estimator,
    }
    if where == "loss":
        found["algorithm.kl_importance_weights"] = weighted
    return found


def updates(reading: Reading, samples: float, minibatch: float, prompts: int, keys: str) -> int:
    """Returns the optimizer steps of a pass: `samples` of a step in mini-batches of `minibatch` samples, whole groups each."""
    if minibatch <= 0 or samples <= minibatch:
        if minibatch > samples > 0:
            reading.differs(
                f"{keys}: the mini-batch is larger than the {samples:g} samples of a step; each step has one update"
            )
        return 1
    exact = samples / minibatch
    found = max(1, min(round(exact), prompts))
    if found != exact:
        reading.differs(
            f"{keys}: {samples:g} samples in mini-batches of {minibatch:g} would be {exact:g} updates; an update takes whole "
            f"groups, so there are {found}"
        )
    return found


def microbatch(reading: Reading, sequences: float, longest: float) -> int | None:
    """Returns the tokens of a forward and backward pass for a number of the longest sequences."""
    return int(max(1, sequences) * longest) if sequences > 0 and longest > 0 else None


def probe(temperature: Any, samples: Any) -> dict[str, Any]:
    """Returns how an evaluation samples, by nmoe's modes."""
    count, heat = int(samples or 1), float(temperature or 0)
    if heat == 0 and count > 1:
        return {"eval.0.mode": f"nondet_proxy_pass@{count}"}
    if heat == 0:
        return {"eval.0.mode": "greedy_pass@1"}
    return {"eval.0.samples": count, "eval.0.temperature": heat}


def wandb_and_others(names: Any) -> list[str]:
    """Returns the sinks among names of loggers; the console and no logger at all are none."""
    several = (
        names
        if isinstance(names, list | tuple)
        else str(names or "").strip("[]").replace("'", "").replace('"', "").split(",")
    )
    known = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio", "csv": "csv"}
    return list(dict.fromkeys(known[name.strip()] for name in map(str, several) if name.strip() in known))


_PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkvz",
    "in_proj_ba",
    "out_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate",
)  # fmt: skip


def lora_targets(reading: Reading, given: Any) -> list[str] | None:
    """Returns the projections to adapt; None for nmoe's default, which is what `all-linear` means for a dense model."""
    if given in (None, "", "null"):
        return None
    several = [str(one) for one in (given if isinstance(given, list | tuple) else re.split(r"[\s,]+", str(given)))]
    if several == ["all-linear"]:
        reading.differs(
            "LoRA on all-linear: nmoe adapts the projections of attention and, in a dense model, of the MLP; experts by "
            "lora.targets"
        )
        return None
    kept = [one for one in several if one in _PROJECTIONS]
    if lost := [one for one in several if one not in _PROJECTIONS]:
        reading.differs(
            f"LoRA on {', '.join(lost)}: nmoe has no such projection to adapt; docs/guides/lora.md lists them"
        )
    return kept or None


PRECISIONS: Mapping[str, str] = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "fp32": "float32",
    "float32": "float32",
}  # fmt: skip


def grader(reading: Reading, named: Sequence[str], task: str = "math") -> dict[str, Any]:
    """Returns the task that grades instead of a trainer's own reward code, which the user has to look at."""
    by = " and ".join(named)
    reading.fill(
        "environment.task",
        f"the grader for {by or 'the reward code of the launch'}: a task (`nmoe env list`, docs/guides/grading.md), "
        f"or your function as "
        "[[environment.rewards]] (docs/guides/rewards.md)",
    )
    return {"environment.task": task}
