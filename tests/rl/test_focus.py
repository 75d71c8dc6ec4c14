"""Which problems are drawn where some sources are solved and others are not."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from rl.policy_cases import answer, settings

from nmoe.envs.pools.pool import Drawn
from nmoe.rl.rollouts import DECAY, LEAST, Focus, learnable, solve_rate
from nmoe.trajectory import Group
from nmoe.types import Problem


def group(source: str, *correct: float) -> Group:
    return Group(Problem("p", "sort", "q", "a", source), [answer(1.0, correct=one) for one in correct])


def test_what_is_solved_less_is_drawn_more() -> None:
    focus = Focus(0)
    assert focus.share("anything") == 1.0
    focus.observe([group("a", 1, 1, 1, 0), group("a", 1, 1, 1, 0), group("b", 0, 0), group("c", 1, 1)])
    assert focus.rates == {"a": 0.75, "b": 0.0, "c": 1.0}
    assert (focus.share("a"), focus.share("b"), focus.share("c")) == (0.25, 1.0, LEAST)
    assert focus.metrics() == {"focus/a": 0.25, "focus/b": 1.0, "focus/c": LEAST}


def test_easy_sources_come_first_where_the_learnable_are_favoured() -> None:
    """r (1 - r): 0.1875 for the source solved at 3/4, 0.09375 at 1/8 (0.109375 / 0.1875 = 7/12), nothing where all or none is."""
    focus = Focus(0, learnable)
    focus.observe(
        [group("easy", 1, 1, 1, 0), group("hard", 1, *[0] * 7), group("unsolved", 0, 0), group("solved", 1, 1)]
    )
    assert focus.metrics() == {
        "focus/easy": 1.0,
        "focus/hard": pytest.approx(7 / 12),
        "focus/solved": LEAST,
        "focus/unsolved": LEAST,
    }
    # Once the easy one is solved, the hard one leads.
    for _ in range(30):
        focus.observe([group("easy", 1, 1, 1, 1), group("hard", 1, 1, 0, 0)])
    assert (focus.share("hard"), focus.share("easy")) == (1.0, LEAST)
    nothing = Focus(0, learnable)
    nothing.observe([group("a", 0, 0), group("b", 0, 0)])
    assert (nothing.share("a"), nothing.share("b")) == (1.0, 1.0)


def test_rates_are_averages_over_steps_and_stay_where_a_source_was_not_met() -> None:
    focus = Focus(0)
    focus.observe([group("a", 1, 1), group("b", 0, 0)])
    focus.observe([group("b", 1, 1)])
    assert focus.rates == {"a": 1.0, "b": pytest.approx(1 - DECAY)}


def test_everything_solved_is_drawn_alike() -> None:
    focus = Focus(0)
    focus.observe([group("a", 1, 1), group("b", 1, 1)])
    assert (focus.share("a"), focus.share("b")) == (1.0, 1.0)


def test_the_draw_is_a_function_of_seed_and_position_at_the_share_s_rate() -> None:
    focus = Focus(3)
    focus.observe([group("a", 1, 1, 1, 0), group("b", 0, 0)])
    drawn = [Drawn(position, Problem("p", "sort", "q", "a", "a")) for position in range(4000)]
    taken = [focus.admits(one) for one in drawn]
    assert sum(taken) / len(taken) == pytest.approx(0.25, abs=0.03)
    assert [focus.admits(one) for one in reversed(drawn)] == taken[::-1]
    other = Focus(4)
    other.rates = focus.rates
    assert [other.admits(one) for one in drawn] != taken


def test_open_problems_would_be_drawn_in_place_of_all_others() -> None:
    pool = {"type": "jsonl", "path": "essays.jsonl", "task_type": "open"}
    essays = {"env_id": "essays", "task_pool": pool, "rubric": {"format": 1.0}}
    with pytest.raises(ValidationError, match="open problems are never solved"):
        settings(environment=essays, batch={"favour_unsolved": True})
    with pytest.raises(ValidationError, match="pays for short right answers, and open problems have none"):
        settings(environment=essays, algorithm={"length_penalty": 0.1})


def test_an_open_problem_has_no_solve_rate() -> None:
    essay = Group(Problem("p", "open", "q", "", "essays"), [answer(1.0, correct=0.0), answer(2.0, correct=0.0)])
    assert solve_rate(essay) is None, "it is not unsolved"
    focus = Focus(0, learnable)
    focus.observe([essay, group("sums", 1, 0)])
    assert focus.rates == {"sums": 0.5}
    assert focus.share("essays") == 1.0
