"""Rows that the catalogues of several trainers share: each function takes the trainer's spelling of the keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nmoe.config.launches.rows import Converted, Reading, Row, together
from nmoe.config.launches.shared import FILL_IN, at_home, lora_targets, wandb_and_others


def model(key: str, nearby: str = "the checkpoint to start from") -> Row:
    """The checkpoint; to be filled in where the launch does not name it."""

    def convert(reading: Reading) -> Converted:
        path = reading[key]
        if not reading.has(key) or path is None or "$" in str(path):
            reading.fill("model.path", nearby)
        return {"model.path": at_home(path or f"{FILL_IN}/model")}

    return together({key: "model.path"}, convert, "the same")


def betas(key: str) -> Row:
    """AdamW's two decays in one key."""

    def convert(reading: Reading) -> Converted:
        first, second = reading[key]
        return {"optimizer.beta1": float(first), "optimizer.beta2": float(second)}

    return together({key: ("optimizer.beta1", "optimizer.beta2")}, convert, "the two of them")


_ADAM = re.compile(r"(fused|cpu)?adamw?(_(torch|apex)\w*)?")
_MUON = "nmoe's Muon moves weights as far as AdamW does at the same learning rate; set optimizer.learning_rate for that"


def optimizer(key: str, momentum: str = "", muon: str = _MUON) -> Row:
    """AdamW or Muon. `muon` is what differs in the trainer's Muon, and `momentum` the key of its momentum."""

    def convert(reading: Reading) -> Converted:
        kind = str(reading[key] or "adamw").lower()
        if "muon" in kind:
            reading.differs(f"{key} = {reading[key]}: {muon}")
            return {"optimizer.kind": "muon", "optimizer.momentum": float(reading[momentum]) if momentum else None}
        if not _ADAM.fullmatch(kind):
            reading.differs(f"{key} = {reading[key]}: nmoe has AdamW and Muon; AdamW is written")
        return {"optimizer.kind": "adamw"}

    keys = {key: "optimizer.kind"} | ({momentum: "optimizer.momentum"} if momentum else {})
    return together(keys, convert, "muon for names with it, else adamw")


def lora(rank: str, alpha: str, targets: str) -> Row:
    """Adapters, off at rank 0."""

    def convert(reading: Reading) -> Converted:
        if not (size := reading.whole(rank)):
            return {}
        scale = float(reading.number(alpha, 16))
        return {"lora.rank": size, "lora.alpha": scale, "lora.targets": lora_targets(reading, reading[targets])}

    return together(
        {rank: "lora.rank", alpha: "lora.alpha", targets: "lora.targets"},
        convert,
        "rank 0 trains all weights; all-linear: nmoe's default targets",
    )


def length(steps: str, passes: str, ours: str = "run.episodes") -> Row:
    """How long a run is, in steps of sampling or in passes; the steps count where both are given."""

    def convert(reading: Reading) -> Converted:
        if (most := reading.whole(steps)) > 0:
            return {"run.steps": most}
        return {ours: float(reading.number(passes))}

    return together({steps: "run.steps", passes: ours}, convert, "the same; the steps count over the passes")


def critic(
    estimator: str, rate: str, path: str, gamma: str, decay: str, clip: str, warmup: str | None, gae: str = "gae"
) -> Row:
    """The critic of PPO, only with the estimator `gae`."""

    def convert(reading: Reading) -> Converted:
        if str(reading[estimator]).rpartition(".")[2].lower() != gae:
            return {}
        return {
            "critic.learning_rate": float(reading[rate]),
            "critic.path": reading[path] if reading.has(path) else None,
            "critic.gamma": float(reading[gamma]),
            "critic.trace_decay": float(reading[decay]),
            "critic.clip": float(reading[clip]),
            "critic.warmup_steps": max(0, reading.whole(warmup)) if warmup else None,
        }

    keys = {rate: "critic.learning_rate", path: "critic.path", gamma: "critic.gamma", decay: "critic.trace_decay"}
    keys |= {clip: "critic.clip"} | ({warmup: "critic.warmup_steps"} if warmup else {})
    return together(keys, convert, "only with the estimator gae")


def offload(*keys: str) -> Row:
    """Weights, gradients or optimizer on the host."""

    def convert(reading: Reading) -> Converted:
        on = [reading.yes(key) for key in keys]  # all of them are read
        return {"parallel.offload": "cpu" if any(on) else None}

    return together(dict.fromkeys(keys, "parallel.offload"), convert, "true: cpu")


def template(key: str) -> Row:
    """Arguments of the chat template."""

    def convert(reading: Reading) -> Converted:
        return {"environment.chat_template_kwargs": reading.below(key) or None}

    ours = "environment.chat_template_kwargs"
    return together({key: ours, f"{key}.*": ours}, convert, "the same")


def sinks(loggers: str, project: str) -> Row:
    """Where metrics go; the project where a sink has one."""

    def convert(reading: Reading) -> Converted:
        to = wandb_and_others(reading[loggers])
        has_project = "wandb" in to or "trackio" in to
        named = reading[project] if has_project else None
        return {"sinks.to": to or None, "sinks.project": None if named is None else str(named)}

    return together(
        {loggers: "sinks.to", project: "sinks.project"},
        convert,
        "wandb, tensorboard, trackio; the console is always there",
    )


def resume(key: str, resuming: Sequence[str], from_path: str, text: str) -> Row:
    """A mode of resuming: `resuming` are those that go on with the newest checkpoint, `from_path` names another one."""

    def convert(reading: Reading) -> Converted:
        mode = str(reading[key]).lower()
        if mode == from_path:
            reading.differs(
                f"{key.rpartition('.')[2]} = {mode}: nmoe resumes the run of the same name; to start from its weights, name it in "
                f"model.path"
            )
        return {"run.resume": "auto" if mode in (*resuming, from_path) else None}

    return together({key: "run.resume"}, convert, text)


def overlong(buffer: str, factor: str, enabled: str | None = None) -> Row:
    """The penalty of answers near the limit."""

    def convert(reading: Reading) -> Converted:
        if (enabled and not reading.yes(enabled)) or not (length := reading.whole(buffer)):
            return {}
        if (most := reading.number(factor, 1)) != 1:
            reading.differs(f"{factor} = {most}: nmoe's penalty rises to 1")
        return {"algorithm.overlong_buffer": length}

    keys = dict.fromkeys(filter(None, (buffer, factor, enabled)), "algorithm.overlong_buffer")
    return together(keys, convert, "its length, if it is on")


def columns(**names: str) -> Row:
    """The columns of examples, by nmoe's names for them."""

    def convert(reading: Reading) -> Converted:
        found: dict[str, Any] = {
            ours: str(reading[theirs]) for ours, theirs in names.items() if reading[theirs] not in (None, "", ours)
        }
        return {"records.columns": found or None}

    return together(dict.fromkeys(names.values(), "records.columns"), convert, "the columns")
