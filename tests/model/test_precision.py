"""Casting a model: everything takes the precision but the routers, whose numbers are those of the checkpoint to the bit."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_family
from torch import Tensor

from nmoe.model.checkpoint import export_model, load_model, save_model
from nmoe.model.precision import Precision, set_precision
from nmoe.model.transformer import Transformer


@pytest.fixture
def close_biases() -> Transformer:
    """DeepSeek-V3's routing with 64 experts whose balancing biases lie around 4.5, as in its release: 4 values in bf16."""
    model = tiny_family("deepseek_v3", experts=64, layers=2)
    generator = torch.Generator().manual_seed(0)
    for moe in model.moe_layers():
        moe.router.bias.copy_(4.5 + 0.02 * torch.randn(64, generator=generator))
        assert moe.router.bias.bfloat16().unique().numel() < 8 < moe.router.bias.unique().numel() == 64
    return model


def routers(model: Transformer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "router" in name}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_cast_leaves_routers_and_tables_as_they_are(close_biases: Transformer, precision: Precision) -> None:
    before, cos = routers(close_biases), close_biases.rope_cos.clone()
    assert set_precision(close_biases, precision) is close_biases
    after = routers(close_biases)
    assert {name.rpartition(".")[2] for name in before} == {"weight", "bias"}
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert torch.equal(close_biases.rope_cos, cos)
    others = [tensor for name, tensor in close_biases.state_dict().items() if "router" not in name]
    assert {tensor.dtype for tensor in others} == {getattr(torch, precision)}


def test_loading_and_storing_below_fp32_keeps_the_routers(tmp_path: Path, close_biases: Transformer) -> None:
    """A run in bf16, its checkpoint, what is exported of it and a replay that loads it route alike."""
    before = routers(close_biases)
    (tmp_path / "run").mkdir()
    save_model(set_precision(close_biases, "bfloat16"), tmp_path / "run")
    export_model(load_model(tmp_path / "run", torch.bfloat16), tmp_path / "out")
    for model in (
        load_model(tmp_path / "run", torch.bfloat16),
        set_precision(load_model(tmp_path / "run"), "bfloat16"),
        load_model(tmp_path / "out", torch.bfloat16),
    ):
        assert model.embedding.weight.dtype == torch.bfloat16
        assert all(torch.equal(tensor, before[name]) for name, tensor in routers(model).items())
