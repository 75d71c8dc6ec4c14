"""Decides whether tensors that came are those that were sent, and all that the model has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_SHOWN = 5


def digest(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def check_names(names: Sequence[str], wanted: set[str], optional: set[str] = frozenset()) -> None:
    """Raises ValueError unless `names` holds each wanted name once, and nothing else but optional names."""
    problems = {
        "came twice": {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set(),
        "missing": wanted - optional - set(names),
        "not of this model": set(names) - wanted - optional,
    }
    _raise([f"{name} is {problem}" for problem, found in problems.items() for name in sorted(found)], len(names))


def check_tensors(tensors: Mapping[str, Tensor], names: Sequence[str], digests: Sequence[str]) -> None:
    """Raises ValueError unless there is a tensor of each name and no other, and each has its digest."""
    if len(names) != len(digests):
        raise ValueError(f"weights refused: {len(names)} names, but {len(digests)} digests")
    check_names(names, set(tensors))
    wrong = [name for name, sent in zip(names, digests, strict=True) if digest(tensors[name]) != sent]
    _raise([f"{name} has another digest than was sent" for name in wrong], len(names))


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
