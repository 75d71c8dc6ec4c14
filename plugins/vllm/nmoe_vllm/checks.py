"""Decides whether tensors that came are those that were sent, and all that the model has."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

_SHOWN = 5


def digest(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def check(
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    digests: Sequence[str],
    model: Mapping[str, Tensor],
    optional: Collection[str] = (),
) -> None:
    """Raises ValueError unless each of the model's tensors came once, with the shape that it has there and the digest that was
    sent, and nothing else. Optional ones may be left out."""
    sent = dict(zip(names, digests, strict=False))
    shapes = [(name, list(tensors[name].shape), list(model[name].shape)) for name in tensors if name in model]
    faults = {
        "came twice": [name for name, count in Counter(names).items() if count > 1],
        "is missing": model.keys() - set(optional) - set(names),
        "is not of this model": set(names) - model.keys(),
        "came without a digest": set(names) - sent.keys(),
        "is named, but did not come": set(names) - tensors.keys(),
        "came, but is not named": tensors.keys() - set(names),
        "has another digest than was sent": [n for n in tensors.keys() & sent.keys() if digest(tensors[n]) != sent[n]],
    }
    found = [f"{name} {fault}" for fault, having in faults.items() for name in sorted(having)]
    found += [f"{name} has another shape: {came}, and the model {own}" for name, came, own in shapes if came != own]
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ValueError(
            f"weights refused, {len(names)} names came: {'; '.join(found[:_SHOWN])}{more}. The server still has the weights "
            "that it had; start an update again and send all of them"
        )
