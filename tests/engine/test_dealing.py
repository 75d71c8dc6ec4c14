"""Dealing requests over workers: by expected tokens, and to the worker that has the prefix where that costs little, by hand."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from nmoe.engine.api import Request
from nmoe.engine.dealing import Dealing
from nmoe.types import Sampling


def request(samples: int = 2, tokens: int = 20) -> Request:
    return Request((1, 2, 3), samples, Sampling(tokens), "r")


def test_work_is_what_is_left_of_requests_in_expected_tokens() -> None:
    """Before a sample has finished, one is expected to have half of its limit; afterwards the mean of those that have."""
    dealing = Dealing(3)
    with dealing.dealt(0, request()) as finished:
        assert dealing.left == [2 * 10, 0, 0]
        assert dealing.choose(range(3), request()) == 1
        finished(4)
        assert dealing.left == [10, 0, 0]
        with dealing.dealt(1, request(3)), dealing.dealt(2, request(1)):
            assert dealing.left == [10, 3 * 4, 4], "the one sample that has finished had 4 tokens"
            assert dealing.choose(range(3), request()) == 2
            assert dealing.choose([0, 1], request()) == 0, "of the two that are open"
        finished(8)
    assert dealing.left == [0, 0, 0]
    with suppress(RuntimeError), dealing.dealt(1, request()):
        assert dealing.left == [0, 2 * 6, 0], "the mean of 4 and 8"
        raise RuntimeError
    assert dealing.left == [0, 0, 0], "a request that failed is no work either"


@pytest.mark.parametrize(
    ("left", "preferred", "chosen"),
    [
        # A request of two samples is 20 tokens: so much more may be left where the prefix is.
        ([20, 0, 0], 0, 0),
        ([20.5, 0, 0], 0, 1),
        ([50, 30, 40], 0, 0),
        ([51, 30, 40], 0, 1),
        ([0, 30, 40], 1, 0),
        ([0, 20, 40], 1, 1),
        ([5, 5, 5], 2, 2),
        ([5, 5, 5], None, 0),
    ],
)
def test_the_worker_with_the_prefix_is_preferred_by_one_request(
    left: list[float], preferred: int | None, chosen: int
) -> None:
    dealing = Dealing(3)
    dealing.left = left
    assert dealing.choose(range(3), request(), preferred) == chosen


def test_a_preferred_worker_that_is_not_open_is_passed_over() -> None:
    dealing = Dealing(3)
    dealing.left = [0, 9, 3]
    assert dealing.choose([1, 2], request(), 0) == 2


def test_a_group_stays_where_its_prefix_is_until_others_have_a_request_less() -> None:
    """Requests of one prompt, all at once: the second stays, the third would be one too many."""
    dealing, places = Dealing(2), []
    with ExitStack() as running:
        for _ in range(5):
            places.append(dealing.choose(range(2), request(), 0))
            running.enter_context(dealing.dealt(places[-1], request()))
    assert places == [0, 0, 1, 0, 1]
