"""Decides whether tensors that came are those that were sent, and all that the model has."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_SHOWN = 5


def digest(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def check_names(names: Sequence[str], wanted: set[str], optional: set[str]) -> None:
    """Raises ValueError unless `names` holds each wanted name once, and nothing else. Optional ones may
    be left out."""
    twice = {name for name, count in Counter(names).items() if count > 1}
    problems = {
        "came twice": twice,
        "is missing": wanted - optional - set(names),
        "is not of this model": set(names) - wanted,
    }
    _raise([f"{name} {problem}" for problem, found in problems.items() for name in sorted(found)], len(names))


def check_tensors(tensors: Mapping[str, Tensor], names: Sequence[str], digests: Sequence[str]) -> None:
    """Raises ValueError unless there is a tensor of each name and no other, and each has its digest."""
    if len(names) != len(digests):
        raise ValueError(f"weights refused: {len(names)} names, but {len(digests)} digests")
    problems = [f"{name} is named, but did not come" for name in sorted(set(names) - set(tensors))]
    problems += [f"{name} came, but is not named" for name in sorted(set(tensors) - set(names))]
    sent = [(name, sha) for name, sha in zip(names, digests, strict=True) if name in tensors]
    _raise(
        problems + [f"{name} has another digest than was sent" for name, sha in sent if digest(tensors[name]) != sha],
        len(names),
    )


def check_shapes(tensors: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless each tensor has the shape that the model has under its name."""
    pairs = [(name, list(tensor.shape), list(model[name].shape)) for name, tensor in tensors.items() if name in model]
    _raise([f"{name} has shape {came}, the model {own}" for name, came, own in pairs if came != own], len(tensors))


def _raise(problems: list[str], came: int) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"weights refused, {came} names came: {'; '.join(problems[:_SHOWN])}{more}. The server still has the weights "
            "that it had; start an update again and send all of them"
        )
