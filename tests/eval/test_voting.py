"""Majority vote: answers are counted by what their task finds equal."""

from __future__ import annotations

import pytest

from nmoe.errors import InfrastructureError
from nmoe.eval.outcomes import majorities
from nmoe.grading.math.policy import Policy
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Grade, Problem, Sampling, Verdict, single_turn


def group(task_type: str, *answers: str | None, question: str = "?", **metadata: str) -> Group:
    problem = Problem("p", task_type, question, "", "p", metadata)
    grades = [Grade(0.0, {}, "ok", {}, answer) for answer in answers]
    return Group(
        problem, [Trajectory(problem, i, (0,), single_turn((1,)), g, Sampling(8)) for i, g in enumerate(grades)]
    )


@pytest.mark.parametrize(
    ("voters", "place"),
    [
        (group("math", "0.5", "1/2", r"\frac12", "3", "3"), 0),
        (group("gsm8k", "3", "3", "0.5", "1/2", "50/100"), 2),
        (group("math", r"x^2+1", "7", r"1+x^2", r"x^2 + 1"), 0),
        # Digits are compared as text: "0135" is not the number 135.
        (group("sort", "135", "0135", "135 "), 0),
        (group("sort", "0135", "135", "00135", "135"), 1),
        (group("multiple_choice", "C", "(B)", "B", "two", options='["one", "two", "three"]'), 1),
        (group("math", None, None, "4"), 2),
        (group("math", None, None), 0),
        (group("math", "5", "4"), 0),
        # The fuller answer is the same as the shorter one, whichever came first.
        (group("math", "4", "5", r"5\text{ cm}"), 1),
        (group("math", "4", r"5\text{ cm}", "5"), 1),
        (group("math", "(1,2)", "2,1", "1,2", question="List both, separated by commas."), 1),
    ],
)
def test_the_majority_is_counted_by_the_grader(voters: Group, place: int) -> None:
    assert majorities([voters]) == [place]


def test_a_lost_comparison_ends_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(gold: str, answer: str, policy: Policy) -> Verdict:
        return Verdict("error", 0.0, "symbolic", "the worker was killed")

    monkeypatch.setattr("nmoe.envs.tasks.math.grade_answer", lost)
    with pytest.raises(InfrastructureError, match="answers to p could not be compared: the worker was killed"):
        majorities([group("math", "x+1", "1+x")])
