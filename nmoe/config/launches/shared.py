"""Conversions that the catalogues of several trainers share: datasets, schedules, names, updates, evaluation, KL."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from nmoe.config.elsewhere import VALUES
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


def name_of_dataset(value: Any) -> str:
    """Returns the name of an environment for a dataset: the last part of its path without the ending."""
    return name_of(str(value).rstrip("/").split("/")[-1].partition(".")[0]) or "problems"


def _several(paths: Any) -> list[str]:
    given = paths if isinstance(paths, list | tuple) else str(paths or "").split(",")
    return [at_home(str(one).strip()) for one in given if str(one).strip()]


def pool(
    reading: Reading, prefix: str, paths: str, split: str = "", subset: str = "", limit: str = ""
) -> dict[str, Any]:
    """Returns the keys of a task pool at `prefix` (`environment.task_pool`) for a dataset: a file, several, or a hub name. `paths`,
    `split`, `subset` and `limit` are the trainer's keys; a key that the kind of dataset does not need is not read."""
    several = _several(reading[paths])
    if not several:
        reading.fill(f"{prefix}.path", "the problems to train on, which the launch does not name")
        return {f"{prefix}.type": "jsonl", f"{prefix}.path": f"{FILL_IN}/train.jsonl"}
    suffix = PurePosixPath(several[0]).suffix
    is_generic = suffix in (*_FILES, ".json")
    is_one_kind = is_generic and all(PurePosixPath(one).suffix == suffix for one in several)
    found: dict[str, Any]
    if suffix == ".json" or (is_one_kind and len(several) > 1):
        files = several if is_one_kind else several[:1]
        kind = _GENERIC[suffix.removeprefix(".")]
        found = {f"{prefix}.type": "hf", f"{prefix}.dataset": kind, f"{prefix}.data_files": files}
    elif is_generic:
        found = {f"{prefix}.type": _FILES[suffix], f"{prefix}.path": several[0]}
    else:
        found = {
            f"{prefix}.type": "hf",
            f"{prefix}.dataset": several[0],
            f"{prefix}.split": (split and reading[split]) or "train",
            f"{prefix}.subset": reading[subset] if subset else None,
        }
    if len(several) > 1 and not is_one_kind:
        reading.differs(
            f"{len(several)} datasets: only the first is written; mix the others by [[{prefix}.sources]] "
            f"(docs/guides/environments.md)"
        )
    if limit and 0 < (most := reading.number(limit)) < 10**7:
        found[f"{prefix}.max_examples"] = int(most)
    if "$" in "".join(several):
        reading.fill(
            f"{prefix}.{'path' if f'{prefix}.path' in found else 'dataset'}", "a variable that the script does not set"
        )
    return found


def records(reading: Reading, paths: str, split: str = "", subset: str = "", limit: str = "") -> dict[str, Any]:
    """Returns the keys of [records] for a dataset of examples; the arguments are the trainer's keys, as in `pool`."""
    several = _several(reading[paths])
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
    if limit and 0 < (most := reading.number(limit)) < 10**6:
        path += f"@[:{int(most)}]"
    if suffix in _GENERIC:
        return {"records.path": path}
    return {
        "records.path": path,
        "records.split": reading[split] if split else None,
        "records.subset": reading[subset] if subset else None,
    }


def of_the_run(reading: Reading, steps: int, of_each: int, what: str) -> int:
    """Returns a number of optimizer steps in steps of the run, each of which has `of_each` of them, rounded up."""
    if steps % of_each:
        reading.differs(
            f"{steps} {what} are no multiple of the {of_each} optimizer steps that a step of nmoe has; rounded up"
        )
    return math.ceil(steps / of_each)


def warmup_of_run(reading: Reading, steps: int, of_each: int) -> int:
    """Returns a warm-up in steps of the run."""
    return of_the_run(reading, steps, of_each, "steps of warm-up")


def end_of_schedule(reading: Reading, kind: str, least: Callable[[], Any] = lambda: None) -> float:
    """Returns optimizer.min_lr_ratio for a schedule by its name in transformers. `least` gives the share of the peak that it ends
    at, where it has one; only the cosines ask for it."""
    if kind in ("constant", "constant_with_warmup"):
        return 1.0
    if kind in ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        share = least()
        if share is None and "min_lr" in kind:
            raise ValueError(f"{kind} needs its lowest rate")
        return float(share or 0)
    if kind == "linear":
        reading.differs(f"schedule linear: {LINEAR}")
    else:
        reading.differs(f"schedule {kind}: nmoe has a linear warm-up and a half cosine; this one ends at 0")
    return 0.0


def kl(coef: float, where: str, estimator: str, weighted: bool = False) -> Converted:
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


def words(ours: str, *own: str) -> Mapping[str, str]:
    """Returns other trainers' words for the values of nmoe's key `ours`, and nmoe's `own` words that they share."""
    return {**VALUES[ours], **dict(zip(own, own, strict=True))}


def nearest(reading: Reading, key: str, names: Mapping[str, str], instead: str) -> str:
    """Returns nmoe's name for a key's value, in any case; `instead`, with a remark, for a value that has none."""
    value = str(reading[key])
    if value.lower() not in names:
        reading.differs(f"{key} = {value}: nmoe has none like it; {instead} is written")
    return names.get(value.lower(), instead)


def uncorrected(reading: Reading, updates: int, has_engine: bool) -> dict[str, Any]:
    """Returns no correction, with a remark where nmoe's ratios then are to the probabilities that the engine reports."""
    if has_engine and updates == 1:
        reading.differs(
            f"one update of a step without a correction: nmoe's ratios are to the probabilities that the engine reported, "
            f"{reading.program.trainer}'s to the learner's own before the update"
        )
    return {"algorithm.correction": "none"}


def truncated_in_mean(reading: Reading, aggregation: str) -> None:
    """Remarks that masked completions count in another trainer's mean of sequences, and not in nmoe's."""
    if aggregation != "token":
        reading.differs(
            f"completions cut at the limit are masked: {reading.program.trainer} still divides by their number; nmoe's mean is of "
            f"the others"
        )


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


PRECISIONS = words("model.precision", "bfloat16", "float16", "float32")
ADVANTAGES = words("algorithm.advantage", "grpo", "dr_grpo", "rloo", "gae", "maxrl")
DIVERGENCES = words("algorithm.kl_estimator", "k1", "k2", "k3")


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


def reward_model(reading: Reading, path: Any) -> dict[str, Any]:
    """Returns the keys of a reward model; another trainer's checkpoint has another head, and has to be replaced."""
    key = "environment.rewards.0"
    reading.fill(f"{key}.path", "a reward model trained by `nmoe reward`; another's checkpoint has another head")
    return {
        "environment.task": "open",
        f"{key}.type": "reward_model",
        f"{key}.name": "reward_model",
        f"{key}.path": str(path),
    }


def colocated(reading: Reading, nodes: int = 1) -> dict[str, Any]:
    """Returns the layout of engines on the GPUs that train, with what differs from engines that sleep in the meantime."""
    reading.differs(
        f"engines sleep while {reading.program.trainer} trains on the same GPUs; nmoe's keep placement.memory_share of a GPU: "
        f"lower it to what training leaves (`nmoe plan`)"
    )
    if nodes > 1:
        reading.fill(
            "placement.layout",
            "nmoe's engines share GPUs with training on one machine alone; on several, give them their own: disaggregated, with "
            'launcher = "ray"',
        )
    return {"placement.layout": "colocated"}


def examples(reading: Reading, count: int, longest: int, at_once: int, sequences: int) -> dict[str, Any]:
    """Returns a supervised batch in tokens: `count` examples of `sequences` sequences each (2 for pairs) of the longest length."""
    kind = "pairs" if sequences == 2 else "sequences"
    reading.differs(
        f"nmoe counts a step in tokens: {count} {kind} of at most {longest} tokens fill a step only if all are as long; with "
        f"shorter ones a step has more of them"
    )
    return {
        "records.tokens_per_step": count * longest * sequences,
        "batch.tokens_per_microbatch": max(1, at_once) * longest * sequences,
    }
