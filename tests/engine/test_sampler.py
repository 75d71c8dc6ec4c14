"""The sampler and the random numbers that it draws by."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from nmoe.engine.native.sampler import SamplingColumns, kept_mask, penalized, raw_logprobs, sample, uniforms
from nmoe.model.logprobs import head_logprobs, restrict_to_kept

LARGEST = 1 - 2**-24  # the largest draw below 1
INF = float("inf")


def columns(rows: int, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> SamplingColumns:
    """The same settings for every row, or a list of them."""

    def column(value, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    settings = [column(temperature, torch.float32), column(top_p, torch.float32), column(top_k, torch.int64)]
    cuts = bool((settings[1] < 1).any() or (settings[2] > 0).any() or min_p)
    rare = column(min_p, torch.float32) if min_p else None
    return SamplingColumns(*settings, plain=bool((settings[0] == 1).all()), cuts=cuts, min_p_B=rare)


def logits_of(probabilities: list[float], rows: int = 1) -> Tensor:
    return torch.tensor(probabilities).log().repeat(rows, 1)


def test_a_draw_falls_where_the_cumulated_mass_first_exceeds_it() -> None:
    draws = torch.arange(1024) / 1024
    tokens, logprobs, kept = sample(logits_of([0.125, 0.5, 0.25, 0.125], 1024), columns(1024), draws)
    assert tokens.bincount().tolist() == [128, 512, 256, 128]
    assert tokens.tolist() == sorted(tokens.tolist())
    assert logprobs[[0, 500, 800, 1023]].tolist() == pytest.approx(
        [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)], abs=1e-6
    )
    assert kept is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [p * p / 0.365 for p in (0.5, 0.3, 0.15, 0.05)]),
        (
            {"temperature": 2.0},
            [math.sqrt(p) / sum(map(math.sqrt, (0.5, 0.3, 0.15, 0.05))) for p in (0.5, 0.3, 0.15, 0.05)],
        ),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.9}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9}, [0.25 / 0.34, 0.09 / 0.34, 0, 0]),
        ({"min_p": 0.31}, [0.625, 0.375, 0, 0]),
        (
            {"temperature": 2.0, "min_p": 0.5},
            [math.sqrt(p) / sum(map(math.sqrt, (0.5, 0.3, 0.15))) for p in (0.5, 0.3, 0.15)] + [0],
        ),
        ({"top_k": 3, "min_p": 0.05}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(settings: dict[str, float], expected: list[float]) -> None:
    draws = torch.from_numpy(np.random.default_rng(0).random(20_000, dtype=np.float32))
    tokens, logprobs, _ = sample(logits_of([0.5, 0.3, 0.15, 0.05], 20_000), columns(20_000, **settings), draws)
    counts = tokens.bincount(minlength=4).tolist()
    support = [i for i, p in enumerate(expected) if p]
    assert sum(counts[i] for i in support) == 20_000
    observed, wanted = [counts[i] for i in support], [20_000 * expected[i] for i in support]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3
    for token in support:
        assert logprobs[tokens == token].tolist() == pytest.approx(
            [math.log(expected[token])] * counts[token], abs=1e-5
        )


def test_min_p_keeps_what_transformers_keeps() -> None:
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = 3 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    for temperature, top_k, top_p, min_p in [(1.0, 0, 1.0, 0.1), (0.6, 20, 1.0, 0.02), (1.7, 30, 0.9, 0.3)]:
        warpers = [TemperatureLogitsWarper(temperature)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        expected = LogitsProcessorList([*warpers, MinPLogitsWarper(min_p)])(torch.zeros(200, 1).long(), logits)
        _, _, kept = sample(logits, columns(200, temperature, top_p, top_k, min_p), torch.zeros(200))
        assert kept is not None
        assert torch.equal(kept, expected.isfinite())
        assert 200 < kept.sum() < kept.numel()


def test_min_p_of_one_keeps_the_largest_and_its_equals() -> None:
    _, _, kept = sample(torch.tensor([[1.0, 3.0, 3.0, 2.9]]), columns(1, min_p=1.0), torch.zeros(1))
    assert kept is not None
    assert kept.tolist() == [[False, True, True, False]]


def test_penalties_are_openais() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    tokens = torch.tensor([[2, 2, 0, 3], [1, 3, 3, 3], [1, 1, 1, 1]])
    counted = torch.tensor([3, 4, 0])  # the last row's tokens are those of an earlier sequence
    found = penalized(logits, tokens, counted, torch.tensor([0.5, 0.0, 2.0]), torch.tensor([0.25, -1.0, 2.0]))
    assert found.tolist() == [[0.25, 2.0, 2.0, 4.0], [1.0, 3.0, 3.0, 7.0], [1.0, 2.0, 3.0, 4.0]]


def test_raw_logprobs_are_sorted_and_of_equals_the_lower_id_comes_first() -> None:
    logits = torch.tensor(
        [[0.0, 2.0, -1.0, 2.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0], [-1e4, 0.0, -1e4, -1e4, -9e3, -1e4]]
    )
    found, values, ids = raw_logprobs(logits, torch.tensor([3, 5, 1]), 5)
    expected = logits.log_softmax(-1)
    assert ids.tolist() == [[1, 3, 0, 4, 5], [0, 1, 2, 3, 4], [1, 4, 0, 2, 3]]
    assert torch.allclose(values, expected.gather(1, ids), rtol=0, atol=1e-6)
    assert found.tolist() == pytest.approx(expected[[0, 1, 2], [3, 5, 1]].tolist(), abs=1e-6)
    assert math.copysign(1, values[2, 0].item()) == 1  # all mass: 0, and not -0
    _, none, _ = raw_logprobs(logits, torch.tensor([3, 5, 1]), 0)
    assert none.shape == (3, 0)


def test_the_likeliest_of_a_wide_vocabulary_are_those_of_a_sort() -> None:
    logits = torch.randint(-4, 5, (8, 5000), generator=torch.Generator().manual_seed(1)).float()  # many are equal
    _, values, ids = raw_logprobs(logits, torch.zeros(8, dtype=torch.int64), 700)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :700]
    assert torch.equal(ids, order)
    assert torch.allclose(values, logits.log_softmax(-1).gather(1, order), rtol=0, atol=2e-6)


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.0], [5.0, 5.0, 1.0], [-INF, -2.0, -3.0]])
    for draw in (0.0, LARGEST):
        tokens, logprobs, _ = sample(logits, columns(3, temperature=0.0), torch.full((3,), draw))
        assert tokens.tolist() == [1, 0, 1]
        assert logprobs.tolist() == [0.0, 0.0, 0.0]


def test_every_row_has_its_own_settings() -> None:
    # One distribution under six settings, at the draw that is last of all: the last token that each keeps, in order of id.
    logits = logits_of([0.1, 0.4, 0.3, 0.2], 6)
    mixed = columns(
        6, temperature=[1.0, 0.0, 0.5, 1.0, 1.0, 1.0], top_p=[1.0, 1.0, 1.0, 0.5, 1.0, 0.75], top_k=[0, 0, 0, 0, 1, 3]
    )
    tokens, logprobs, kept = sample(logits, mixed, torch.full((6,), LARGEST))
    assert tokens.tolist() == [3, 1, 3, 2, 1, 2]
    expected = [0.2, 1.0, 0.04 / 0.3, 0.3 / 0.7, 1.0, 0.3 / 0.7]
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in expected], abs=1e-6)
    assert kept is not None
    assert [row.nonzero().flatten().tolist() for row in kept] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 2],
        [1],
        [1, 2],  # of the three largest, renormalised 4/9, 3/9, 2/9, two reach 0.75
    ]


@pytest.mark.parametrize(
    ("probabilities", "top_p", "top_k", "kept"),
    [
        ([0.1, 0.4, 0.3, 0.2], 1.0, 0, [0, 1, 2, 3]),
        ([0.1, 0.4, 0.3, 0.2], 1.0, 2, [1, 2]),
        ([0.1, 0.4, 0.3, 0.2], 1.0, 9, [0, 1, 2, 3]),
        ([0.1, 0.4, 0.3, 0.2], 0.65, 0, [1, 2]),
        ([0.1, 0.4, 0.3, 0.2], 0.75, 0, [1, 2, 3]),
        ([0.5, 0.25, 0.125, 0.125], 0.5, 0, [0]),  # reached exactly: the fewest
        ([0.5, 0.25, 0.125, 0.125], 0.75, 0, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.8, 0, [0, 1, 2]),  # of equals the lower id
        ([0.25, 0.25, 0.25, 0.25], 1.0, 3, [0, 1, 2]),
        ([0.1, 0.4, 0.3, 0.2], 0.55, 2, [1]),  # 4/7 of what top-k left is enough; 0.4 of the whole would not be
        ([0.1, 0.4, 0.3, 0.2], 1e-6, 0, [1]),
        ([0.1, 0.4, 0.3, 0.2], 0.0, 0, [1]),
        ([0.5, 0.0, 0.5, 0.0], 0.999, 0, [0, 2]),
    ],
)
def test_kept_sets_by_hand(probabilities: list[float], top_p: float, top_k: int, kept: list[int]) -> None:
    mask = kept_mask(logits_of(probabilities), torch.tensor([top_p]), torch.tensor([top_k]))
    assert mask[0].nonzero().flatten().tolist() == kept


def test_equal_logits_are_kept_in_order_of_id() -> None:
    logits = torch.zeros(2, 5000)
    mask = kept_mask(logits, torch.tensor([1.0, 0.01]), torch.tensor([7, 0]))
    assert mask[0].nonzero().flatten().tolist() == list(range(7))
    assert mask[1].nonzero().flatten().tolist() == list(range(int(mask[1].sum())))
    assert int(mask[1].sum()) == pytest.approx(50, abs=1)


@pytest.mark.parametrize("lost", [-INF, -1000.0])
def test_draws_at_the_very_ends_meet_no_token_without_mass(lost: float) -> None:
    logits = torch.tensor([[lost, lost, 0.0, 1.0, lost], [0.0, lost, lost, lost, lost], [lost, lost, lost, lost, 2.0]])
    lowest, _, _ = sample(logits, columns(3), torch.zeros(3))
    highest, logprobs, _ = sample(logits, columns(3), torch.full((3,), LARGEST))
    assert lowest.tolist() == [2, 0, 4]
    assert highest.tolist() == [3, 0, 4]
    assert logprobs.tolist() == pytest.approx([-math.log1p(math.exp(-1)), 0, 0], abs=1e-6)


LOGIT = st.one_of(st.floats(-8, 8, width=32), st.floats(-120, 0, width=32), st.just(-INF))


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(LOGIT, min_size=1, max_size=40).filter(lambda row: max(row) > -INF),
    draw=st.one_of(st.integers(0, 2**24 - 1), st.sampled_from([0, 1, 2**24 - 2, 2**24 - 1])).map(lambda n: n / 2**24),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 3]),
)
def test_whatever_is_drawn_has_mass_and_the_learners_logprob(
    logits: list[float], draw: float, temperature: float, top_p: float, top_k: int
) -> None:
    row = torch.tensor([logits])
    tokens, logprobs, kept = sample(row, columns(1, temperature, top_p, top_k), torch.tensor([draw]))
    token = int(tokens)
    assert math.exp((row[0, token] - row.max()).double() / temperature) > 0
    restricted, ids = row, None
    if kept is not None:
        assert kept[0, token]
        ids = kept[0].nonzero().T
        restricted = restrict_to_kept(row, ids)
    else:
        assert (top_p, top_k) == (1.0, 0)
    # The learner has finite logits, here as hidden states under a head that is the identity.
    scored, _ = head_logprobs(row.clamp(min=-1e30), torch.eye(len(logits)), tokens, temperature, ids)
    assert logprobs.item() == pytest.approx(scored.item(), abs=1e-5, rel=1e-6)
    # It is the token whose share of the cumulated mass the draw falls into.
    mass = (restricted.double() / temperature).softmax(-1)[0].cumsum(0)
    assert (0.0 if token == 0 else mass[token - 1].item()) - 1e-5 <= draw <= mass[token].item() + 1e-5


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
