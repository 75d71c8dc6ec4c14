"""Precision of a model: which parts are cast, and the test of exact numerics on this machine."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_family
from torch import Tensor

from nmoe.config.commands import RunConfig
from nmoe.model.checkpoint import export_model, load_model, save_model
from nmoe.model.exactness import inexact_parts, numerics_here
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.ops.cpu.packing import PackedWeights, kernels_in_use
from nmoe.model.ops.exact.ops import ExactSums
from nmoe.model.ops.torch import TorchOps
from nmoe.model.packed import PackedAttention
from nmoe.model.precision import cast
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import describe, provenance_of
from nmoe.types import Precision


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
    assert cast(close_biases, getattr(torch, precision)) is close_biases
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
    save_model(cast(close_biases, torch.bfloat16), tmp_path / "run")
    export_model(load_model(tmp_path / "run", torch.bfloat16), tmp_path / "out")
    for model in (
        load_model(tmp_path / "run", torch.bfloat16),
        cast(load_model(tmp_path / "run"), torch.bfloat16),
        load_model(tmp_path / "out", torch.bfloat16),
    ):
        assert model.embedding.weight.dtype == torch.bfloat16
        assert all(torch.equal(tensor, before[name]) for name, tensor in routers(model).items())


@pytest.mark.parametrize("where", ["learner", "engine", "engine without kernels"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@torch.no_grad()
def test_logits_are_not_rounded(precision: Precision, where: str) -> None:
    """Of states and weights in low precision, whose products fp32 holds: a rounded logit of 10 would be wrong by up to 0.03."""
    model = cast(tiny_family("qwen3"), getattr(torch, precision))
    ids = torch.randint(48, (40,), generator=torch.Generator().manual_seed(0))
    states = model(ids, torch.arange(40), PackedAttention([40], ids.device), RouterTrace())
    assert states.dtype == model.head_weight.dtype == getattr(torch, precision)
    expected = states.double() @ model.head_weight.double().T
    rounded = expected.to(states.dtype).double()
    with ExitStack() as stack:
        if where != "learner":
            stack.enter_context(PackedWeights().active())
        if where == "engine":
            stack.enter_context(kernels_in_use())
        logits = model.logits(states)
        logprobs, _ = head_logprobs(states, model.head_weight, ids)
    assert logits.dtype == torch.float32
    off = (logits - expected).abs().mean()
    assert off < 1e-5
    assert off < 0.01 * (rounded - expected).abs().mean()
    reference = expected.log_softmax(-1)[torch.arange(40), ids]
    torch.testing.assert_close(logprobs.double(), reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_exact_numerics_are_exact_here(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert inexact_parts() == []
        assert numerics_here("exact") == "exact"
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def library_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and narrow products by a library that takes another kernel for fewer than eight rows."""

    def moved(out: Tensor) -> Tensor:
        return out * (1 + 1e-7) if len(out) < 8 else out

    plain_norm = TorchOps.rms_norm
    monkeypatch.setattr(TorchOps, "rms_norm", lambda self, x, w, eps: moved(plain_norm(self, x, w, eps)))
    monkeypatch.setattr(ExactSums, "linear", lambda self, x, w: moved(F.linear(x, w)))


def config(numerics: str) -> RunConfig:
    return RunConfig.model_validate({"run": {"name": "r", "steps": 1}, "model": {"path": "p", "numerics": numerics}})


def test_what_is_not_exact_is_found_by_name(library_by_rows: None) -> None:
    assert {"norms", "norms of heads", "narrow products"} <= set(inexact_parts())
    assert "attention" not in inexact_parts()
    assert numerics_here("fast") == "fast"


def test_a_run_names_inexact_parts_in_its_first_lines_and_its_provenance(library_by_rows: None) -> None:
    line, *more = describe(config("exact"), None)
    assert line.startswith("numerics: exact was asked for, and on this machine the bits of ")
    assert "norms" in line
    assert line.endswith("the bound of fast numerics, a mean of 1e-4")
    assert more == describe(config("fast"), None) == []
    recorded = provenance_of(config("exact"), 1)["numerics"]
    assert recorded.startswith("exact, but for ")
    assert "norms" in recorded
    assert provenance_of(config("fast"), 1)["numerics"] == "fast"
