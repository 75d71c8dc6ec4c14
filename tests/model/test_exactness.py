"""What a run finds out of exact numerics on the machine at hand, and what it says where they are not exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.config.commands import RunConfig
from nmoe.model.exactness import inexact_parts, numerics_here
from nmoe.model.ops.exact.ops import ExactSums
from nmoe.model.ops.torch import TorchOps
from nmoe.recipes.setup import describe, provenance_of


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


def test_a_run_says_it_in_its_first_lines_and_its_provenance(library_by_rows: None) -> None:
    line, *more = describe(config("exact"), None)
    assert line.startswith("numerics: exact was asked for, and on this machine the bits of ")
    assert "norms" in line
    assert line.endswith("the bound of fast numerics, a mean of 1e-4")
    assert more == describe(config("fast"), None) == []
    recorded = provenance_of(config("exact"), 1)["numerics"]
    assert recorded.startswith("exact, but for ")
    assert "norms" in recorded
    assert provenance_of(config("fast"), 1)["numerics"] == "fast"
