"""Counter-based draws: against SplitMix64 written out in whole numbers, and what makes them usable as keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nmoe.engine.native.sampler import uniforms

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int, draws: int) -> list[int]:
    """Its first outputs from this state, as in the published reference code."""
    out = []
    for _ in range(draws):
        state = (state + GOLDEN) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


def test_the_reference_here_gives_the_published_numbers() -> None:
    assert splitmix64(0, 3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@settings(deadline=None)
@given(st.integers(-(2**63), 2**64 - 1), st.integers(1, 6), st.integers(1, 6))
def test_draws_are_nested_splitmix64_streams(seed: int, samples: int, positions: int) -> None:
    (root,) = splitmix64(seed & MASK, 1)
    expected = [[draw >> 40 for draw in splitmix64(state, positions)] for state in splitmix64(root, samples)]
    assert (uniforms(seed, samples, positions).astype(np.float64) * 2**24).tolist() == expected


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 9), st.integers(1, 9))
def test_asking_for_more_changes_no_draw(seed: int, samples: int, positions: int) -> None:
    whole = uniforms(seed, 9, 9)
    assert np.array_equal(uniforms(seed, samples, positions), whole[:samples, :positions])


def test_draws_are_uniform_and_lie_below_one() -> None:
    draws = uniforms(1234, 400, 500)
    assert draws.dtype == np.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    # 200,000 draws: the mean has a standard error of 6.5e-4, the variance one of 1.7e-4.
    assert draws.mean(dtype=np.float64) == pytest.approx(0.5, abs=2.5e-3)
    assert draws.var(dtype=np.float64) == pytest.approx(1 / 12, abs=7e-4)
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3


def test_neighbours_do_not_go_together() -> None:
    draws = uniforms(7, 300, 300).astype(np.float64)
    others = uniforms(8, 300, 300).astype(np.float64)
    pairs = [(draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:]), (draws, others), (draws, draws.T)]
    for one, other in pairs:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.015  # 4.5 standard errors


def test_no_two_seeds_share_a_draw_by_place() -> None:
    seen = np.stack([uniforms(seed, 4, 8).ravel() for seed in range(200)])
    assert len(np.unique(seen)) > 0.999 * seen.size
