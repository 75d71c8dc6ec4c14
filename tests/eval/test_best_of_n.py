"""Best-of-n against known samples, and majority votes: answers are counted by what their task finds equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nmoe.envs.environment import Environment
from nmoe.errors import InfrastructureError
from nmoe.eval.best_of_n import UNANSWERED, best_of_n, score_groups
from nmoe.eval.evaluate import Evaluation
from nmoe.eval.outcomes import Outcome, majorities, outcomes_of
from nmoe.grading.math.question import Policy
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Grade, Message, Problem, Sampling, Verdict, single_turn

GOLD = "7"


def trajectory(problem: Problem, index: int, answer: str | None, ids: Sequence[int] = (1,)) -> Trajectory:
    grade = Grade(0.0, {}, "ok", {"correctness": float(answer is not None and answer.strip() == GOLD)}, answer)
    return Trajectory(problem, index, (0,), single_turn(ids), grade, Sampling(8))


def group(number: int, *answers: str | None) -> Group:
    problem = Problem(f"p/{number}", "sort", f"{number}?", GOLD, "p")
    return Group(problem, [trajectory(problem, index, answer) for index, answer in enumerate(answers)])


def values(results: Sequence[Evaluation]) -> dict[str, float]:
    return {result.mode: result.value for result in results}


GROUPS = [
    group(0, "7", "3", "3"),  # the majority is wrong, the scorer finds the right one
    group(1, "4", " 7", "7 "),  # the majority is right, whatever stands around it
    group(2, "5", "6", "7"),  # a tie: the first counts
    group(3, None, None, "7"),  # silence has no vote
    group(4, "1", "1", "7"),  # neither finds the right one; of equal scores the first counts
]
SCORES = [[2.0, 1.0, 1.5], [0.1, 0.3, 0.0], [0.0, 0.0, 0.5], [UNANSWERED, UNANSWERED, -9.0], [1.0, 0.0, 1.0]]
GREEDY = [group(0, "7"), group(1, "0"), group(2, "0"), group(3, None), group(4, "1")]


def scored(groups: Sequence[Group]) -> list[Outcome]:
    """The outcomes of the first groups, each with its scores."""
    outcomes = zip(outcomes_of(groups), SCORES, strict=False)
    return [replace(outcome, scores=tuple(scores)) for outcome, scores in outcomes]


def test_each_way_of_choosing() -> None:
    results = best_of_n(outcomes_of(GREEDY), scored(GROUPS), "p", 0.8)
    assert values(results) == {
        "greedy_pass@1": 0.2,
        "sampling_pass@1": pytest.approx(6 / 15),
        "sampling_pass@3": 0.4,
        "best_of@3": 0.8,
        "pass@2": pytest.approx(11 / 15),
        "pass@3": 1.0,
        "best_of@3 - sampling_pass@3": pytest.approx(0.4),
    }
    assert all(result.problems == 5 and result.low <= result.value <= result.high for result in results)
    # Differences 1, 0, 1, 0, 0, and two more problems, 1 and -1: mean 2/7, mean square 4/7. Student's quantile with 4 degrees of
    # freedom is 2.776.
    half = 2.776445105 * math.sqrt((4 / 7 - 4 / 49) / 7)
    assert (results[-1].low, results[-1].high) == (pytest.approx(2 / 7 - half), 1.0)
    assert 2 / 7 + half > 1


def test_one_problem_says_nothing_of_the_spread_between_problems() -> None:
    results = best_of_n(outcomes_of(GREEDY[:1]), scored(GROUPS[:1]), "p", 0.8)
    assert (results[-1].value, results[-1].low, results[-1].high) == (1.0, -1.0, 1.0)


class Longest:
    """Scores an answer by its length, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def score(self, messages: Sequence[Message], answer: str) -> float:
        self.asked.append((messages[-1].content, answer))
        return math.nan if answer == "bad" else float(len(answer))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    path = tmp_path_factory.mktemp("environment") / "e.toml"
    path.write_text('env_id = "p"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\ndifficulty = [4, 4]\n')
    return Environment.from_toml(path, Tokenizer.train(["Sort: 12 assistant final"] * 3, 300))


def said(environment: Environment, texts: Sequence[str | None]) -> Group:
    tokenizer = environment.tokenizer
    harmony = Harmony(tokenizer)
    problem = Problem("p/0", "sort", "Sort: 21", "12", "p")
    completions = [
        [] if text is None else harmony.render_completion([Message("assistant", text, channel="final")])
        for text in texts
    ]
    return Group(problem, [trajectory(problem, i, "12", ids) for i, ids in enumerate(completions)])


def test_the_scorer_reads_what_was_said(environment: Environment) -> None:
    scorer = Longest()
    assert score_groups(environment, [said(environment, ["12", None, "112"])], scorer) == [[2.0, UNANSWERED, 3.0]]
    assert scorer.asked == [("Sort: 21", "12"), ("Sort: 21", "112")]


def test_a_score_that_is_no_number_stops_the_evaluation(environment: Environment) -> None:
    with pytest.raises(ValueError, match="problem p/0: the scorer gave NaN to 'bad'"):
        score_groups(environment, [said(environment, ["12", "bad"])], Longest())


def voters(task_type: str, *answers: str | None, question: str = "?", **metadata: str) -> Group:
    problem = Problem("p", task_type, question, "", "p", metadata)
    grades = [Grade(0.0, {}, "ok", {}, answer) for answer in answers]
    return Group(
        problem, [Trajectory(problem, i, (0,), single_turn((1,)), g, Sampling(8)) for i, g in enumerate(grades)]
    )


@pytest.mark.parametrize(
    ("voters", "place"),
    [
        (voters("math", "0.5", "1/2", r"\frac12", "3", "3"), 0),
        (voters("gsm8k", "3", "3", "0.5", "1/2", "50/100"), 2),
        (voters("math", r"x^2+1", "7", r"1+x^2", r"x^2 + 1"), 0),
        # Digits are compared as text: "0135" is not the number 135.
        (voters("sort", "135", "0135", "135 "), 0),
        (voters("sort", "0135", "135", "00135", "135"), 1),
        (voters("multiple_choice", "C", "(B)", "B", "two", options='["one", "two", "three"]'), 1),
        (voters("math", None, None, "4"), 2),
        (voters("math", None, None), 0),
        (voters("math", "5", "4"), 0),
        # The fuller answer is the same as the shorter one, whichever came first.
        (voters("math", "4", "5", r"5\text{ cm}"), 1),
        (voters("math", "4", r"5\text{ cm}", "5"), 1),
        (voters("math", "(1,2)", "2,1", "1,2", question="List both, separated by commas."), 1),
    ],
)
def test_the_majority_is_counted_by_the_grader(voters: Group, place: int) -> None:
    assert majorities([voters]) == [place]


def test_a_lost_comparison_ends_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(gold: str, answer: str, policy: Policy) -> Verdict:
        return Verdict("error", 0.0, "symbolic", "the worker was killed")

    monkeypatch.setattr("nmoe.envs.tasks.math.grade_answer", lost)
    with pytest.raises(InfrastructureError, match="answers to p could not be compared: the worker was killed"):
        majorities([voters("math", "x+1", "1+x")])
