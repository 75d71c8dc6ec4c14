"""Routing statistics and load balancing, by hand."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch

from nmoe.learner.routing import RoutingStatistics, auxiliary_loss, count_load, entropy_sums, move_router_bias
from nmoe.model.moe import RouterTrace
from nmoe.model.transformer import Transformer


def trace(replay: list[list[list[int]]] | None = None) -> RouterTrace:
    """Two layers, three tokens, four experts, two picks."""
    first = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    second = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    return RouterTrace(
        replay=None if replay is None else torch.tensor(replay, dtype=torch.int16),
        chosen_TK=[torch.tensor([[0, 1], [3, 2], [0, 1]]), torch.tensor([[0, 1], [0, 1], [0, 3]])],
        scores_TE=[first, second],
        biases_E=[torch.zeros(4), torch.tensor([0.0, 0.0, 0.0, 0.01])],
    )


def add(statistics: RoutingStatistics, trace: RouterTrace) -> None:
    statistics.add(trace, count_load(trace, statistics.load_YE.shape[1]), entropy_sums(trace))


OWN = [[[0, 1], [0, 1]], [[3, 2], [0, 1]], [[0, 1], [0, 3]]]


def test_load_counts_the_picks() -> None:
    assert count_load(trace(), 4).tolist() == [[2, 2, 1, 1], [3, 2, 0, 1]]


def test_load_counts_what_was_run_when_routes_are_replayed() -> None:
    replay = [[[2, 3], [0, 1]], [[2, 3], [0, 1]], [[2, 3], [0, 2]]]
    assert count_load(trace(replay), 4).tolist() == [[0, 0, 3, 3], [3, 2, 1, 0]]


def test_statistics_by_hand() -> None:
    statistics = RoutingStatistics.empty(2, 4)
    add(statistics, trace())
    assert statistics.load_YE.tolist() == [[2, 2, 1, 1], [3, 2, 0, 1]]
    add(statistics, trace())
    assert statistics.load_YE.tolist() == [[4, 4, 2, 2], [6, 4, 0, 2]]
    assert statistics.tokens == 6
    assert statistics.picks == 6 * 2 * 2
    assert statistics.load_max_violation() == pytest.approx([4 / 3 - 1, 6 / 3 - 1])
    assert statistics.dead_experts() == [0, 1]
    first = -sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4))
    assert statistics.router_entropy() == pytest.approx([first, (math.log(4) + math.log(2) + 0) / 3], abs=1e-6)
    assert (statistics.flips, statistics.largest_flip_gap) == (0, 0.0)


def test_entropy_is_that_of_normalised_scores() -> None:
    statistics = RoutingStatistics.empty(1, 2)
    add(statistics, RouterTrace(None, [torch.tensor([[0]])], [torch.tensor([[0.9, 0.9]])], [torch.zeros(2)]))
    assert statistics.router_entropy() == pytest.approx([math.log(2)], abs=1e-6)


def test_violation_of_few_tokens_over_many_experts() -> None:
    statistics = RoutingStatistics(
        torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1]]), torch.zeros(1, dtype=torch.float64), tokens=2
    )
    assert statistics.load_max_violation() == [3.0]  # a mean load of a quarter


def test_replayed_routes_of_ones_own_flip_nothing() -> None:
    statistics = RoutingStatistics.empty(2, 4)
    turned = [[picks[::-1] for picks in token] for token in OWN]  # the order of picks is no difference
    add(statistics, trace(turned))
    assert (statistics.flips, statistics.largest_flip_gap) == (0, 0.0)


def test_flips_are_counted_with_their_gap() -> None:
    replay = [[[0, 2], [0, 1]], [[3, 2], [2, 3]], [[0, 1], [0, 3]]]
    statistics = RoutingStatistics.empty(2, 4)
    add(statistics, trace(replay))
    # Token 0, layer 0: expert 2 (0.2) ran where 1 (0.3) would have. Token 1, layer 1: 2 and 3 (0.0 and 0.01 with its bias) ran
    # for 0 and 1 (0.5 each).
    assert statistics.flips == 1 + 2
    assert statistics.largest_flip_gap == pytest.approx(0.5 - 0.0)
    only_first = RoutingStatistics.empty(2, 4)
    add(only_first, trace([replay[0], OWN[1], OWN[2]]))
    assert only_first.flips == 1
    assert only_first.largest_flip_gap == pytest.approx(0.3 - 0.2)
    falling = RoutingStatistics.empty(2, 4)
    add(falling, trace([[[0, 3], [0, 1]], OWN[1], [[0, 1], [0, 2]]]))
    assert falling.largest_flip_gap == pytest.approx(0.3 - 0.1), "a later flip has a smaller gap, 0.01"
    biased = RoutingStatistics.empty(2, 4)
    add(biased, trace([OWN[0], OWN[1], [[0, 1], [0, 2]]]))
    assert biased.flips == 1
    assert biased.largest_flip_gap == pytest.approx(0.01)  # of the scores that were chosen by, bias included


def test_flips_of_a_training_pass_warn_of_nothing() -> None:
    """Its scores have gradients, and torch warns where one that has is made a number."""
    replayed = trace([[[0, 2], [0, 1]], OWN[1], OWN[2]])
    replayed.scores_TE[:] = [scores_TE.requires_grad_() for scores_TE in replayed.scores_TE]
    statistics = RoutingStatistics.empty(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add(statistics, replayed)
    assert statistics.largest_flip_gap == pytest.approx(0.3 - 0.2)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_of_a_batch_join_to_the_whole(order: tuple[int, int]) -> None:
    """As the parts of several ranks do: counts and sums add up, and the largest gap is that of either part."""
    small = [OWN[0], OWN[1], [[0, 1], [0, 2]]]  # a gap of 0.01
    large = [[[0, 2], [0, 1]], [[3, 2], [2, 3]], OWN[2]]  # a gap of 0.5
    whole, parts = RoutingStatistics.empty(2, 4), [RoutingStatistics.empty(2, 4) for _ in range(2)]
    for part, replay in zip(parts, (small, large), strict=True):
        add(part, trace(replay))
        add(whole, trace(replay))
    assert [round(part.largest_flip_gap, 6) for part in parts] == [0.01, 0.5]
    first, second = (parts[place] for place in order)
    first.join(second)
    assert first.largest_flip_gap == pytest.approx(0.5)
    assert (first.tokens, first.picks, first.flips) == (whole.tokens, whole.picks, whole.flips) == (6, 24, 1 + 3)
    assert first.load_YE.tolist() == whole.load_YE.tolist()
    assert first.entropy_sum_Y.tolist() == pytest.approx(whole.entropy_sum_Y.tolist())


def test_auxiliary_loss_of_uniform_load_is_its_coefficient() -> None:
    uniform = RouterTrace(None, [torch.zeros(6, 2)] * 3, [torch.full((6, 4), 0.25)] * 3)
    assert auxiliary_loss(uniform, torch.full((3, 4), 0.25), 6, 0.01).item() == pytest.approx(0.01)


def test_auxiliary_loss_by_hand() -> None:
    shares = torch.tensor([[2, 2, 1, 1], [3, 2, 0, 1]]) / 6
    first = [0.9 / 3, 0.8 / 3, 0.7 / 3, 0.6 / 3]
    second = [1.75 / 3, 0.75 / 3, 0.25 / 3, 0.25 / 3]
    layers = [sum(f * p for f, p in zip(shares[y].tolist(), ps, strict=True)) for y, ps in enumerate((first, second))]
    assert auxiliary_loss(trace(), shares, 3, 0.5).item() == pytest.approx(0.5 * 4 * sum(layers) / 2, abs=1e-6)
    # Half of a batch of twice the tokens has half the loss.
    assert auxiliary_loss(trace(), shares, 6, 0.5).item() == pytest.approx(0.25 * 4 * sum(layers) / 2, abs=1e-6)


def test_auxiliary_loss_normalises_sigmoid_scores() -> None:
    scores = torch.tensor([[0.9, 0.3]])
    loss = auxiliary_loss(RouterTrace(None, [torch.tensor([[0]])], [scores]), torch.tensor([[1.0, 0.0]]), 1, 1.0)
    assert loss.item() == pytest.approx(2 * 0.75)


def test_router_bias_moves_against_the_load(tiny_model: Callable[..., Transformer]) -> None:
    model = tiny_model(router_bias_rate=0.01)
    before = [moe.router.bias.clone() for moe in model.moe_layers()]
    move_router_bias(model, torch.tensor([[6, 0, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1]]))
    moved = [moe.router.bias - was for moe, was in zip(model.moe_layers(), before, strict=True)]
    assert moved[0].tolist() == pytest.approx([-0.01, 0.01, 0, 0, 0, 0], abs=1e-7)
    assert moved[1].tolist() == [0.0] * 6


def test_router_bias_stays_without_a_rate(tiny_model: Callable[..., Transformer]) -> None:
    model = tiny_model()
    before = [moe.router.bias.clone() for moe in model.moe_layers()]
    move_router_bias(model, torch.tensor([[6, 0, 3, 3, 3, 3], [6, 0, 3, 3, 3, 3]]))
    assert all(torch.equal(moe.router.bias, was) for moe, was in zip(model.moe_layers(), before, strict=True))
