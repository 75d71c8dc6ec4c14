"""Heads: what they compute, and what of a checkpoint's head is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nmoe.errors import UserError
from nmoe.model.head import Head, load_head


def filled(outputs: int = 2) -> Head:
    head = Head(3, outputs, "reward")
    with torch.no_grad():
        head.weight.copy_(torch.arange(3.0 * outputs).view(outputs, 3))
        head.bias.copy_(torch.arange(1.0, outputs + 1))
    return head


def test_a_linear_map_in_fp32_that_begins_at_zero() -> None:
    states = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]], dtype=torch.bfloat16)
    out = filled()(states)
    assert out.dtype == torch.float32
    assert out.tolist() == [[0 + 4 + 1, 3 + 10 + 2], [1 + 1, 4 + 2]]
    assert Head(3, 2, "value")(states).tolist() == [[0, 0], [0, 0]]


def test_saved_and_loaded(tmp_path: Path) -> None:
    filled().save(tmp_path)
    assert json.loads((tmp_path / "head.json").read_text()) == {"hidden_size": 3, "outputs": 2, "kind": "reward"}
    loaded = load_head(tmp_path, 3, "reward")
    assert torch.equal(loaded.weight, filled().weight)
    assert torch.equal(loaded.bias, filled().bias)
    fresh = Head(3, 2, "reward")
    fresh.load_weights(tmp_path)
    assert torch.equal(fresh.weight, filled().weight)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: (d / "head.json").unlink(), "no such file: this checkpoint has no head"),
        (lambda d: (d / "head.json").write_text("{"), "not the description of a head"),
        (lambda d: (d / "head.json").write_text('{"hidden_size": 4, "outputs": 2, "kind": "reward"}'), "of width 4"),
        (lambda d: (d / "head.json").write_text('{"hidden_size": 3, "outputs": 2, "kind": "step"}'), "of kind 'step'"),
        (lambda d: (d / "head.json").write_text('{"hidden_size": 3, "outputs": 1, "kind": "reward"}'), "another shape"),
        (lambda d: (d / "head.safetensors").write_bytes(b"torn"), "torn"),
        (
            lambda d: save_file(
                {"weight": torch.full((2, 3), torch.nan), "bias": torch.zeros(2)}, d / "head.safetensors"
            ),
            "not finite",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, spoil: Callable[[Path], object], says: str) -> None:
    filled().save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=says):
        load_head(tmp_path, 3, "reward")


def test_another_number_of_outputs_is_refused(tmp_path: Path) -> None:
    filled(1).save(tmp_path)
    with pytest.raises(UserError, match="a head of 1 outputs, where 2 are wanted"):
        Head(3, 2, "reward").load_weights(tmp_path)
