"""A checkpoint's fingerprint, by which an adapter recognises its base."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from nmoe.model.checkpoint import read_config
from nmoe.model.shards import open_tensors

# Settings that decoders had not when fingerprints were first written into adapters. At 0 or empty they leave a decoder as it was.
_LATER = (
    *("rotary_dim", "window_rope_theta", "gelu", "output_norms", "norm_offset", "scale_embedding"),
    *("short_factors", "long_factors", "expert_profile"),
)


def fingerprint(directory: Path) -> str:
    """SHA-256 over family, configuration and every stored weight: name, dtype, shape and bytes. It does not depend on the
    files' number or location. Takes about a second per gigabyte. Raises UserError as `load_model` does."""
    family, config = read_config(directory)
    settings = {name: value for name, value in config.to_dict().items() if value or name not in _LATER}
    if (scaling := settings["rope_scaling"]) is not None:
        settings["rope_scaling"] = {name: value for name, value in scaling.items() if value or name not in _LATER}
    digest = hashlib.sha256(json.dumps([family.MODEL_TYPE, settings], sort_keys=True).encode())
    shards = open_tensors(directory)
    for name in sorted(shards.files):
        digest.update(f"{name} {shards.dtype_name(name)} {shards.shapes[name]}".encode())
        digest.update(shards.read(name).reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
