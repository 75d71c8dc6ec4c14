"""What a path to a model means: a checkpoint itself, a run's latest, or that of the `rl/` run in a speedrun's directory."""

from __future__ import annotations

from pathlib import Path

from nmoe.errors import UserError
from nmoe.runs.checkpoint import latest_checkpoint


def resolve_checkpoint(path: Path) -> Path:
    """The directory with `config.json` and `model.safetensors` that `path` names. Raises UserError where there is none."""
    for candidate in (path, path / "rl"):
        # An adapter is none either, which whoever reads it says better.
        if any((candidate / name).exists() for name in ("config.json", "adapter_config.json")):
            return candidate
        if (checkpoint := latest_checkpoint(candidate / "checkpoints")) is not None:
            return checkpoint
    raise UserError(f"{path}: neither a checkpoint (no config.json in it) nor a run that has saved one (checkpoints/)")
