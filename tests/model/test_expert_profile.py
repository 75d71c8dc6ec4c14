"""Experts in a profile: the numbers by hand, their errors, their gradients, and that they are quantised once."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import MOE
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model import expert_profile
from nmoe.model.checkpoint import load_model, save_model
from nmoe.model.config import ModelConfig
from nmoe.model.expert_profile import ProfiledExperts, dequantised, fp8, from_nvfp4, nvfp4
from nmoe.model.moe import MoE, RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.precision import cast, set_expert_profile
from nmoe.model.transformer import Transformer

PROFILES = ("bf16", "fp8", "nvfp4")
MakeModel = Callable[..., Transformer]


def test_fp8_by_hand() -> None:
    # amax 896: a scale of 2. Halved: 448, -0.5, 17 (between 16 and 18, to the even 16), 0.001 (half of the smallest step 2^-9 is
    # 0.00098, so one step), 0.
    x = torch.tensor([[896.0, -1.0, 34.0, 0.002, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    codes, scale = fp8(x, -1)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale[0].item() == 2.0
    assert (codes.float() * scale).tolist() == [[896.0, -1.0, 32.0, 2 * 2.0**-9, 0.0], [0.0] * 5]


def test_fp8_scales_the_outputs_of_a_weight() -> None:
    weight_DN = torch.tensor([[448.0, 1.0], [3.0, 17.0 / 448]])
    # The second output has amax 1, a scale of 1 / 448: 17/448 is the 17 of above.
    expected = torch.tensor([[448.0, 1.0], [3.0, 16.0 / 448]])
    torch.testing.assert_close(dequantised(weight_DN, "fp8"), expected, rtol=2e-7, atol=0)


def test_nvfp4_by_hand() -> None:
    # The largest is 2688 = 6 * 448, so that the factor is 1, and the first block's scale 6 / 6 = 1: its numbers are E2M1's own.
    # Halfway the even code is taken: 0.25 to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 to 4, 5 to 4.
    first = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.26, -0.74, -1.26, -1.74, -2.6, -3.4, -5.1, 0.0]
    weight_ND = torch.tensor([[*first, *[2688.0] * 16, *[0.001] * 16]])
    codes, scales, factor = nvfp4(weight_ND, weight_ND.abs().amax())
    assert factor.tolist() == [1.0]
    # 0.001 / 6 is below half of E4M3's smallest step, 2^-10, so that the third block is lost.
    assert scales.float().tolist() == [[1.0, 448.0, 0.0]]
    assert codes[0, :16].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 9, 9, 11, 11, 13, 13, 15, 0]
    values = from_nvfp4(codes, scales, factor)[0]
    assert values[:16].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -0.5, -0.5, -1.5, -1.5, -3, -3, -6, 0]
    assert values[16:].tolist() == [2688.0] * 16 + [0.0] * 16


# Rounding to m bits of mantissa errs by 2^-m / sqrt(12) of the start of a number's binade, and numbers are about 1.4 times that:
# 0.0016 for bf16 and 0.026 for fp8. The largest of 16 is 2.07 sigma, so that sigma lies at 2.9 of E2M1's 6: half of the numbers lie
# below 2, where steps are 0.5, a third below 4 (steps of 1), and beyond (steps of 2) a tenth beside the largest, which is exact:
# sqrt((0.51 / 4 + 0.32 + 0.105 * 4) / 12) / 2.9 = 0.093, to which the rounding of the scales adds.
@pytest.mark.parametrize(
    ("profile", "low", "high"), [("bf16", 0.0011, 0.0023), ("fp8", 0.025, 0.028), ("nvfp4", 0.090, 0.100)]
)
def test_error_on_gaussian_rows(profile: str, low: float, high: float) -> None:
    weight = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    error_N = (dequantised(weight, profile).float() - weight).norm(dim=0) / weight.norm(dim=0)
    assert low < error_N.mean() < high


# Magnitudes from where scales are normal numbers up to where none overflows.
numbers = st.floats(-(2.0**100), 2.0**100, width=32).map(lambda x: x if abs(x) > 2.0**-80 else 0.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(numbers, min_size=32, max_size=32))
def test_what_holds_of_all_numbers(row: list[float]) -> None:
    weight_DN = torch.tensor(row).unsqueeze(1)
    amax = weight_DN.abs().max()
    for profile in PROFILES:
        out_DN = dequantised(weight_DN, profile).float()
        assert out_DN.isfinite().all()
        assert (out_DN[weight_DN == 0] == 0).all()
        assert (out_DN * weight_DN.sign() >= 0).all()
    # Within half a step: 2^-4 of a normal number, half of the smallest step of 2^-9 of the scale; 2^-20 for the fp32 around it.
    bound_DN = torch.maximum(weight_DN.abs() * 2.0**-4, amax / 448 * 2.0**-10) * (1 + 2.0**-20)
    assert ((dequantised(weight_DN, "fp8") - weight_DN).abs() <= bound_DN).all()
    # What lies on the grid stays there, up to the rounding of the scale.
    once = dequantised(weight_DN, "fp8")
    torch.testing.assert_close(dequantised(once, "fp8"), once, rtol=2.0**-22, atol=0)
    blocks = weight_DN.view(2, 16)
    largest = blocks.abs().amax(1)
    error = (dequantised(weight_DN, "nvfp4").view(2, 16) - blocks).abs().amax(1)
    # The widest gap of E2M1 is 2 of its 6; a block's scale is off by up to 2^-4, and below E4M3's normal numbers by anything.
    normal = largest >= amax * 2.0**-6 / 448 * 1.01
    assert (error[normal] <= largest[normal] * (1 + 2.0**-4) / 6 * 1.001).all()
    assert (error <= largest * 1.001).all()


def test_the_smallest_become_zero_and_the_largest_stay_finite() -> None:
    for profile in PROFILES[1:]:
        assert dequantised(torch.full((16, 1), 1e-44), profile).eq(0).all()
        large = dequantised(torch.full((16, 1), 3e38), profile)
        torch.testing.assert_close(large, torch.full((16, 1), 3e38), rtol=1e-6, atol=0)


def moe_of(profile: str | None) -> tuple[MoE, Tensor]:
    moe = MoE(ModelConfig(**MOE | {"shared_experts": 0, "expert_profile": profile}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return moe, torch.randn(11, 32, generator=generator)


def rounded(x: Tensor, profile: str, axis: int) -> Tensor:
    """A second implementation for fp8 and bf16: by mantissas, not by dtypes."""
    bits, smallest = (7, -126) if profile == "bf16" else (3, -6)
    scale = 1.0 if profile == "bf16" else x.detach().abs().amax(axis, keepdim=True) / 448
    scaled = x.detach() / scale
    step = torch.exp2(torch.frexp(scaled.abs().clamp_min(2.0**smallest))[1] - 1.0 - bits)
    return x + ((scaled / step).round() * step * scale - x.detach())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("profile", ["bf16", "fp8"])
def test_layer_and_gradients_against_a_loop(profile: str, exact: bool) -> None:
    moe, x_TD = moe_of(profile)
    moe.exact = moe.router.exact = exact
    x_TD.requires_grad_()
    trace = RouterTrace()
    out_TD = moe(x_TD, trace)
    weights_TK, chosen_TK = moe.router(x_TD, RouterTrace(replay=trace.chosen_TK[0].unsqueeze(1)))
    rows = []
    for t, x_D in enumerate(x_TD):
        total = torch.zeros(32)
        for weight, expert in zip(weights_TK[t], chosen_TK[t].tolist(), strict=True):
            gate_up = rounded(x_D, profile, -1) @ rounded(moe.gate_up[expert], profile, 0)
            hidden = F.silu(gate_up[:16]) * gate_up[16:]
            total = total + weight * (rounded(hidden, profile, -1) @ rounded(moe.down[expert], profile, 0))
        rows.append(total)
    expected_TD = torch.stack(rows)
    # Sums of up to 32 products in fp32, in another order; a sum that differs in its last bit may round to the next number of the
    # profile, one step in 8 (fp8) or 128 (bf16), which is why a few rows may be further apart. These do not.
    torch.testing.assert_close(out_TD, expected_TD, rtol=1e-4, atol=1e-4)
    loss_weights = torch.randn(out_TD.shape, generator=torch.Generator().manual_seed(1))
    inputs = [x_TD, moe.gate_up, moe.down, moe.router.weight]
    ours = torch.autograd.grad((out_TD * loss_weights).sum(), inputs)
    theirs = torch.autograd.grad((expected_TD * loss_weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_nvfp4_leaves_rows_alone_and_passes_the_gradient_on() -> None:
    moe, x_TD = moe_of("nvfp4")
    out_TD = moe(x_TD, RouterTrace())
    gradients = torch.autograd.grad(out_TD.square().sum(), [moe.gate_up, moe.down])
    plain, _ = moe_of(None)
    with torch.no_grad():
        for weight in (plain.gate_up, plain.down):
            weight.copy_(torch.stack([dequantised(expert, "nvfp4") for expert in weight]))
    expected_TD = plain(x_TD, RouterTrace())
    assert torch.equal(out_TD, expected_TD)
    others = torch.autograd.grad(expected_TD.square().sum(), [plain.gate_up, plain.down])
    assert all(map(torch.equal, gradients, others))


def test_quantised_once_for_each_state_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(weight: Tensor, profile: str) -> Tensor:
        calls.append(weight.shape)
        return dequantised(weight, profile)

    monkeypatch.setattr(expert_profile, "dequantised", counted)
    moe, x_TD = moe_of("fp8")
    with torch.inference_mode():
        before = moe(x_TD, RouterTrace())
    moe(x_TD, RouterTrace()).sum().backward()
    assert len(calls) == 12  # 6 experts, 2 projections: once for sampling and training together
    place = moe.profile.weight("down", moe.down).data_ptr()
    with torch.no_grad():
        moe.down.mul_(2)
    moe.quantise()
    assert len(calls) == 24
    with torch.inference_mode():
        after = moe(x_TD, RouterTrace())
    assert len(calls) == 24
    torch.testing.assert_close(after, 2 * before, rtol=1e-6, atol=0)
    assert moe.profile.weight("down", moe.down).data_ptr() == place


def test_bf16_changes_nothing_in_bf16_and_rounds_in_fp32(tiny_model: MakeModel) -> None:
    ids, positions = torch.arange(9), torch.arange(9)

    def states(model: Transformer) -> Tensor:
        with torch.no_grad():
            return model(ids, positions, PackedAttention([9], ids.device), RouterTrace())

    model = tiny_model()
    plain = states(model)
    rounding = states(set_expert_profile(model, "bf16"))
    assert 0 < (rounding - plain).abs().max() < 0.05
    assert torch.equal(states(set_expert_profile(model, None)), plain)
    low = cast(tiny_model(), torch.bfloat16)
    assert torch.equal(states(low), states(set_expert_profile(low, "bf16")))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(profile: str, value: float) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 16, 16))
    with torch.no_grad():
        weight[1, 3, 4] = value
    with pytest.raises(UserError, match=f"NaN or infinite weights of experts have no {profile}"):
        ProfiledExperts(profile).weight("down", weight)


@pytest.mark.parametrize(
    ("shape", "profile", "message"),
    [
        ({"experts": 0}, "fp8", 'expert_profile = "fp8": fp8 is for routed experts, of which this model has none'),
        ({"expert_width": 24}, "nvfp4", "hidden_size = 32 and expert_width = 24 have to be multiples of 16"),
    ],
)
def test_models_that_a_profile_does_not_fit(tiny_model: MakeModel, shape: dict, profile: str, message: str) -> None:
    model = tiny_model(**shape)
    with pytest.raises(UserError, match=message):
        set_expert_profile(model, profile)
    assert model.config.expert_profile is None


def test_a_checkpoint_keeps_the_parameters_and_names_the_profile(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = set_expert_profile(tiny_model(), "nvfp4")
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert [moe.profile.profile for moe in loaded.moe_layers()] == ["nvfp4"] * 2
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
