"""Routing by task, by routes and divergences worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nmoe.rl.metrics import divergence, routing_by_source, routing_metrics
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn


def sample(source: str, routes: list[list[list[int]]] | None) -> Trajectory:
    """A sample of two tokens after a prompt of two: its routes are of three positions, the first of which only reads."""
    recorded = None if routes is None else np.array(routes, np.int16)
    turn = Turn((), Sample([1, 2], [-1.0, -1.0], [0, 0], "stop", routes=recorded))
    problem = Problem(f"{source}/0", "reverse", "Reverse: 12", "21", source)
    return Trajectory(problem, 0, (5, 6), (turn,), Grade(0.0, {}, "ok", {}, None), Sampling(4))


# Two layers, the first token's picks after those of a position that only reads and takes expert 3.
APART = [[[3, 0], [3, 0]], [[0, 1], [0, 1]], [[1, 0], [0, 2]]]
OTHER = [[[0, 1], [0, 1]], [[2, 3], [0, 1]], [[3, 2], [2, 0]]]


def test_the_shares_of_a_source_count_the_positions_that_predict_its_samples() -> None:
    shares = routing_by_source([sample("sums", OTHER), sample("letters", APART), sample("letters", None)], 4)
    assert [*shares] == ["letters", "sums"]
    assert shares["letters"].tolist() == [[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0]]
    assert shares["sums"].tolist() == [[0, 0, 0.5, 0.5], [0.5, 0.25, 0.25, 0]]


def test_sources_that_share_no_expert_are_apart_by_the_logarithm_of_their_number() -> None:
    metrics = routing_metrics(routing_by_source([sample("sums", OTHER), sample("letters", APART)], 4))
    assert metrics == {"expert_load_divergence/0": pytest.approx(math.log(2)), "expert_load_divergence/1": 0.0}


def test_the_divergence_of_two_sources_by_hand() -> None:
    """[3/4, 1/4] and [1/4, 3/4]: the mean has ln 2, and each ln 4 - 3/4 ln 3."""
    found = divergence(np.array([[[0.75, 0.25]], [[0.25, 0.75]]]))
    assert found.tolist() == [pytest.approx(math.log(2) - math.log(4) + 0.75 * math.log(3))]


def test_one_source_or_no_routes_have_no_divergence() -> None:
    assert routing_metrics(routing_by_source([sample("sums", OTHER), sample("sums", APART)], 4)) == {}
    assert routing_metrics(routing_by_source([sample("sums", OTHER), sample("letters", None)], 4)) == {}
