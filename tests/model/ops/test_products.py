"""Products by oneDNN against torch's own, in values and gradients."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe.model.ops.cpu import library
from nmoe.model.ops.cpu.ops import KernelOps, by_onednn
from nmoe.model.ops.cpu.packing import ONEDNN, PackedWeights, can_pack, can_pack_for_onednn, kernels_in_use
from nmoe.model.ops.table import ops_for

pytestmark = pytest.mark.skipif(not ONEDNN, reason="this torch has no oneDNN")

OPS = ops_for(torch.zeros(1))
EXACT = [False, True]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 3, 5), (2, 8, 4), (37, 16, 100), (64, 100, 7), (0, 4, 4)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("exact", EXACT)
def test_linear_values_and_gradients(rows: int, inputs: int, outputs: int, with_bias: bool, exact: bool) -> None:
    def linear(*tensors: Tensor) -> Tensor:
        return ops_for(tensors[0], exact).linear(*tensors)

    tensors = [draw(rows, inputs), draw(outputs, inputs), *([draw(outputs)] if with_bias else [])]
    upstream = draw(rows, outputs, seed=1)
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    for function, inputs_ in ((linear, ours), (F.linear, theirs)):
        function(*inputs_).backward(upstream)
    torch.testing.assert_close(linear(*tensors), F.linear(*tensors), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear(*tensors), F.linear(*tensors), rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_only_the_gradients_that_are_asked_for() -> None:
    x, weight = draw(4, 6), draw(5, 6).requires_grad_()
    OPS.linear(x, weight).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(weight.grad, x.sum(0).expand(5, 6))


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [1, 5, 1]], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(6, 10), (10, 6)])
@pytest.mark.parametrize("exact", EXACT)
def test_groups(counts: list[int], inputs: int, outputs: int, exact: bool) -> None:
    x, weight, upstream = draw(7, inputs), draw(3, inputs, outputs), draw(7, outputs, seed=1)
    mine = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    other = [x.double().requires_grad_(), weight.double().requires_grad_()]
    out = ops_for(x, exact).linear_by_group(*mine, counts)
    with torch.no_grad():
        assert torch.equal(ops_for(x, exact).linear_by_group(*mine, counts), out)
    expected = torch.cat([part @ other[1][e] for e, part in enumerate(other[0].split(counts))])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    out.backward(upstream)
    expected.backward(upstream.double())
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one.grad.double(), two.grad, rtol=1e-4, atol=1e-4)


def test_other_tensors_take_torchs_own_way() -> None:
    x, weight = draw(3, 4).double(), draw(5, 4).double()
    assert not by_onednn(x)
    assert torch.equal(OPS.linear(x, weight), F.linear(x, weight))
    assert not by_onednn(draw(3, 4).bfloat16())


@pytest.mark.parametrize(("inputs", "outputs"), [(96, 160), (128, 4096), (1024, 256), (100, 130), (36, 48)])
def test_a_rows_bits_do_not_depend_on_the_others(inputs: int, outputs: int) -> None:
    x, weight = draw(300, inputs), draw(outputs, inputs)
    whole = OPS.linear(x, weight)
    for rows in (2, 3, 5, 7, 8, 9, 31, 64, 65, 129, 256, 299):
        assert torch.equal(OPS.linear(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(OPS.linear(x[rows - 2 : rows], weight), whole[rows - 2 : rows]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_bits_and_follow_changes(dtype: torch.dtype) -> None:
    x = draw(6, 32).to(dtype)
    weight, experts = nn.Parameter(draw(48, 32).to(dtype)), nn.Parameter(draw(3, 32, 16).to(dtype))
    packs = PackedWeights()

    def both() -> list[Tensor]:
        return [OPS.linear(x, weight), OPS.linear_by_group(x, experts, [2, 0, 4])]

    with torch.inference_mode():
        plain = both()
        with packs.active():
            assert all(map(torch.equal, both(), plain))
            packable = can_pack_for_onednn(x, weight)  # bf16 only where there are instructions for it
            assert len(packs._packed) == (2 if packable else 0)
    with torch.no_grad():
        for parameter in (weight, experts):
            parameter.mul_(2)
    with torch.inference_mode(), packs.active():
        assert all(torch.equal(after, 2 * before) for after, before in zip(both(), plain, strict=True))
        packs.clear()
        assert not packs._packed
    with packs.active():  # a gradient is asked for
        assert OPS.linear(x, weight).requires_grad
    assert not packs._packed


_LOW_PRECISION_ON_AN_OLDER_PROCESSOR = """
import torch
from torch import nn
from nmoe.model.ops.cpu.ops import CpuOps
from nmoe.model.ops.cpu.packing import PackedWeights

x, weight = torch.randn(6, 32).bfloat16(), nn.Parameter(torch.randn(48, 32).bfloat16())
experts = nn.Parameter(torch.randn(3, 32, 16).bfloat16())
with torch.no_grad():
    plain = [CpuOps().linear(x, weight), CpuOps().linear_by_group(x, experts, [2, 0, 4])]
    with PackedWeights().active():
        packed = [CpuOps().linear(x, weight), CpuOps().linear_by_group(x, experts, [2, 0, 4])]
assert all(map(torch.equal, packed, plain))
"""


def test_where_onednn_has_no_bf16_it_is_torchs() -> None:
    """oneDNN raises on bf16 without AVX-512 or AVX-NE-CONVERT, where a machine without a compiler decodes by `CpuOps`."""
    older = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", _LOW_PRECISION_ON_AN_OLDER_PROCESSOR]
    subprocess.run(command, check=True, env=older)


def test_a_weight_whose_changes_do_not_show_is_not_packed() -> None:
    with torch.inference_mode():
        x, weight = draw(6, 32), nn.Parameter(draw(48, 32), requires_grad=False)
        packs = PackedWeights()
        with packs.active():
            torch.testing.assert_close(OPS.linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)
        assert not packs._packed


def test_what_the_engine_uses_is_in_force_in_its_thread_alone() -> None:
    """A scorer's model may run while the engine's step begins or ends."""
    weight, x_ND = nn.Parameter(torch.randn(64, 32)), torch.randn(8, 32)
    seen = []
    with torch.no_grad(), PackedWeights().active(), kernels_in_use():
        here = (can_pack(x_ND, weight), isinstance(ops_for(x_ND), KernelOps))

        def look() -> None:
            with torch.no_grad():
                seen.append((can_pack(x_ND, weight), isinstance(ops_for(x_ND), KernelOps)))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [(False, False)]
    assert here == (ONEDNN, library.library() is not None)
