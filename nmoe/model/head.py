"""A linear map from final hidden states to a few numbers: a value, a reward, or the logits of two classes."""

# Shapes: N rows, D width, K outputs.

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nmoe.errors import UserError
from nmoe.model.ops.table import ops_for
from nmoe.model.snapshot import Snapshot, hold
from nmoe.parsing import json_of

HeadKind = Literal["value", "reward", "step", "score"]

WEIGHTS, DESCRIPTION = "head.safetensors", "head.json"


class Head(nn.Module):
    """Computes `x @ weight.T + bias` in fp32, at any precision of the model. Weights start at zero, so every output is 0 at first;
    the head's own gradient is not zero then, and the model's gradient is zero only in the first step."""

    def __init__(self, hidden_size: int, outputs: int, kind: HeadKind) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.zeros(outputs, hidden_size))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x_ND: Tensor, exact: bool = False) -> Tensor:
        """Outputs `[N, K]` of normalised final hidden states; `exact` is as in `ops_for`."""
        x_ND = x_ND.to(self.weight.dtype)
        return (
            ops_for(x_ND, exact).linear(x_ND, self.weight, self.bias)
            if exact
            else F.linear(x_ND, self.weight, self.bias)
        )

    def save(self, directory: Path) -> None:
        """Writes the head's weights and description into a checkpoint's directory, beside the model's files."""
        self.snapshot(copied=False).write(directory)

    def snapshot(self, copied: bool) -> Snapshot:
        """Returns a snapshot of the files that `save` would write now. With `copied`, later training steps do not change it."""
        outputs, hidden_size = self.weight.shape
        description = {"hidden_size": hidden_size, "outputs": outputs, "kind": self.kind}
        tensors, size = hold(self.state_dict(), copied)

        def write(directory: Path) -> None:
            (directory / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
            on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            save_file(on_host, directory / WEIGHTS)

        return Snapshot(write, size)

    def load_weights(self, directory: Path) -> None:
        """Loads the weights of a checkpoint's head. Raises UserError as `load_head` does, and if the number of outputs
        differs."""
        outputs, hidden_size = self.weight.shape
        stored = load_head(directory, hidden_size, self.kind)
        if (found := stored.weight.shape[0]) != outputs:
            raise UserError(f"{directory / DESCRIPTION}: a head of {found} outputs, where {outputs} are wanted")
        self.load_state_dict(stored.state_dict())


_MOST_OUTPUTS = 1024


def load_head(directory: Path, hidden_size: int, kind: HeadKind) -> Head:
    """Loads the head of a checkpoint, for a model of this width.

    Raises UserError if the checkpoint has no head, or one of another kind or width, or if the head is damaged or not finite.
    """
    path = directory / DESCRIPTION
    try:
        raw = json_of(path.read_text())
        found, width, outputs = raw["kind"], int(raw["hidden_size"]), int(raw["outputs"])
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file: this checkpoint has no head, and one of kind {kind!r} is wanted"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the description of a head: {error}") from None
    if found not in get_args(HeadKind) or found != kind:
        raise UserError(f"{path}: a head of kind {found!r}, where one of kind {kind!r} is wanted")
    if width != hidden_size:
        raise UserError(f"{path}: a head for a model of width {width}, and this model's width is {hidden_size}")
    if not 1 <= outputs <= _MOST_OUTPUTS:
        raise UserError(f"{path}: outputs = {outputs}; a head has 1 to {_MOST_OUTPUTS}")
    head = Head(hidden_size, outputs, kind)
    try:
        head.load_state_dict(load_file(directory / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(
            f"{directory / WEIGHTS}: missing, torn, or of another shape than {DESCRIPTION} says: {error}"
        ) from None
    if not all(bool(tensor.isfinite().all()) for tensor in head.state_dict().values()):
        raise UserError(f"{directory / WEIGHTS}: holds values that are not finite")
    return head
