"""The losses of Tinker's protocol as objectives of the learner. All are sums over tokens.

With p the model, q the log-probabilities that the client sends, r = p / q and A the advantage:

    cross_entropy          -w log p                                 any sign of w, so that a client can send any gradient
    importance_sampling    -r A
    ppo                    -min(r A, clip(r, low, high) A)          low 0.8, high 1.2
    cispo                  -sg(clip(r, low, high)) A log p          low 0, high 4
    gspo                   as ppo, with the geometric mean of r     low 1 - 3e-4, high 1 + 4e-4, the paper's
                           over the tokens of sequence_ratio_mask
    dro                    -(A log p - beta / 2 (log r)^2)          beta has no default
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmoe.learner.batch import Batch
from nmoe.learner.objectives import Objective, Outputs, Scored, cispo, clip, cross_entropy, dro, gspo
from nmoe.serve.tinker.data import Datum
from nmoe.serve.tinker.errors import TinkerError

Settings = Mapping[str, float | str]


@dataclass(frozen=True)
class Loss:
    """A loss of the protocol: the inputs that each datum has beside `target_tokens`, its settings with their defaults (None: the
    client has to send it), and the objective that these settings make."""

    inputs: tuple[str, ...]
    settings: Mapping[str, float | None]
    objective: Callable[..., Objective]


def _importance_sampling() -> Objective:
    return clip(math.inf, math.inf)


def _ppo(clip_low_threshold: float, clip_high_threshold: float) -> Objective:
    return clip(1 - clip_low_threshold, clip_high_threshold - 1)


def _cispo(clip_low_threshold: float, clip_high_threshold: float) -> Objective:
    return cispo(clip_high_threshold - 1, 1 - clip_low_threshold)


def _gspo(clip_low_threshold: float, clip_high_threshold: float) -> Objective:
    whole = gspo(1 - clip_low_threshold, clip_high_threshold - 1)

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        """The ratio is a mean over the tokens of weight 1 alone."""
        counted = scored.weights_N != 0
        columns: dict[str, Any] = {
            name: column[counted] for name, column in vars(scored).items() if isinstance(column, Tensor)
        }
        loss, _ = whole(Outputs(outputs.logprobs_N[counted], outputs.entropy_N[counted]), Scored(**columns))
        return loss, {}

    return objective


_OF_POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(("weights",), {}, lambda: cross_entropy),
    "importance_sampling": Loss(_OF_POLICY, {}, _importance_sampling),
    "ppo": Loss(_OF_POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, _ppo),
    "cispo": Loss(_OF_POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, _cispo),
    "gspo": Loss(
        (*_OF_POLICY, "sequence_ratio_mask"),
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        _gspo,
    ),
    "dro": Loss(_OF_POLICY, {"beta": None}, dro),
}


def read_loss(name: str, settings: Settings) -> Objective:
    """Returns the objective of a loss with a client's settings. Raises TinkerError for a loss that there is not, and for settings
    that it does not have."""
    if (loss := LOSSES.get(name)) is None:
        why = ": its objective is not published" if name == "stable_reinforce" else ""
        raise TinkerError(f"loss_fn {name!r} is not one of this server's{why}; send one of {', '.join(LOSSES)}")
    if unknown := sorted(settings.keys() - loss.settings.keys()):
        known = ", ".join(loss.settings) or "none"
        raise TinkerError(f"loss_fn_config.{unknown[0]}: {name} has no such setting; its settings: {known}")
    given = {}
    for key, default in loss.settings.items():
        value = settings.get(key, default)
        if value is None:
            raise TinkerError(f"loss_fn_config.{key}: is missing; {name} has no default for it")
        if isinstance(value, str) or not 0 <= value < math.inf:
            raise TinkerError(f"loss_fn_config.{key} = {value!r}: must be a number from 0 up")
        given[key] = value
    if given.get("clip_low_threshold", 0) > given.get("clip_high_threshold", math.inf):
        raise TinkerError(f"loss_fn_config: clip_low_threshold is above clip_high_threshold: {given}")
    return loss.objective(**given)


def check_inputs(data: Sequence[Datum], name: str) -> None:
    """Raises TinkerError if a datum lacks an input of the loss, has another one, or one of another shape than its targets."""
    wanted = {"target_tokens", *LOSSES[name].inputs}
    for index, datum in enumerate(data):
        where = f"data[{index}].loss_fn_inputs"
        if missing := sorted(wanted - datum.inputs.keys()):
            raise TinkerError(f"{where}.{missing[0]}: is missing; {name} reads {', '.join(sorted(wanted))}")
        if extra := sorted(datum.inputs.keys() - wanted):
            raise TinkerError(f"{where}.{extra[0]}: {name} does not read it, but {', '.join(sorted(wanted))}")
        targets = datum.inputs["target_tokens"]
        if targets.ndim == 2 and name != "cross_entropy":
            raise TinkerError(f"{where}.target_tokens: {name} takes one target for each token")
        for key in LOSSES[name].inputs:
            if (shape := datum.inputs[key].shape) != targets.shape:
                raise TinkerError(f"{where}.{key}: has the shape {shape}, and target_tokens {targets.shape}")
        if name == "gspo":
            mask = datum.inputs["sequence_ratio_mask"]
            outside = mask == 0
            if (mask[~outside] != 1).any():
                raise TinkerError(f"{where}.sequence_ratio_mask: must be 0 or 1")
            if (datum.inputs["advantages"][outside] != 0).any():
                raise TinkerError(f"{where}.advantages: must be 0 where sequence_ratio_mask is")


def batch_of(data: Sequence[Datum], name: str) -> Batch:
    """Returns the data as a batch of the learner that scores all positions. K targets for each token are K sequences, which share
    all inputs but the last."""
    rows = [(datum, k) for datum in data for k in range(datum.targets.shape[1])]
    inputs = [datum.token_ids for datum, _ in rows]

    def column(key: str) -> Tensor:
        arrays = [datum.inputs[key] for datum, _ in rows]
        picked = [array if array.ndim == 1 else array[:, k] for array, (_, k) in zip(arrays, rows, strict=True)]
        return torch.from_numpy(np.concatenate(picked).astype(np.float32))

    targets = np.concatenate([datum.targets[:, k] for datum, k in rows]).astype(np.int64)
    inputs_T = torch.from_numpy(np.concatenate(inputs).astype(np.int64))
    of_policy = name != "cross_entropy"
    if of_policy:
        weights_T = (column("sequence_ratio_mask") != 0).float() if name == "gspo" else torch.ones(len(inputs_T))
    else:
        weights_T = column("weights")
    return Batch(
        tuple(map(len, inputs)),
        inputs_T,
        torch.from_numpy(targets),
        torch.ones(len(inputs_T), dtype=torch.bool),
        weights_T,
        advantages_T=column("advantages") if of_policy else None,
        behaviour_logprobs_T=column("logprobs") if of_policy else None,
        prefixes=_prefixes(rows, name),
    )


def _prefixes(rows: Sequence[tuple[Datum, int]], name: str) -> tuple[tuple[int, int], ...]:
    """Returns for each sequence its group and the number of inputs that all of the group share: the samples of a prompt share it.
    A prompt ends where the loss begins to count."""
    key_of = "weights" if name == "cross_entropy" else "advantages"
    groups = dict[bytes, int]()
    found, shared = [], dict[int, int]()
    for datum, _ in rows:
        counts = datum.inputs[key_of] != 0
        counts = counts if counts.ndim == 1 else counts.any(1)
        tokens = len(datum.token_ids)
        alone = datum.targets.shape[1] > 1
        prompt = tokens - 1 if alone else min(int(counts.argmax()) + 1, tokens - 1)
        group = groups.setdefault(datum.token_ids[: tokens if alone else prompt].tobytes(), len(groups))
        shared[group] = min(prompt, shared.get(group, prompt))
        found.append(group)
    return tuple((group, shared[group]) for group in found)


def logprobs_of(data: Sequence[Datum], logprobs_N: Tensor) -> list[np.ndarray]:
    """Returns each datum's log-probabilities, in the shape of its targets, from the values at the positions of `batch_of`."""
    found = []
    values = logprobs_N.float().numpy()
    for datum in data:
        tokens, targets = datum.targets.shape
        taken, values = values[: tokens * targets], values[tokens * targets :]
        found.append(taken.reshape(targets, tokens).T.reshape(datum.inputs["target_tokens"].shape))
    return found
