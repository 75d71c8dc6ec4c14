"""Pools of reasoning-gym: reproducible, split by content, scored by its own verifiers in a process that runs no answer as code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from nmoe.envs.environment import Environment
from nmoe.envs.pools import Pool
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.errors import UserError
from nmoe.grading import gym
from nmoe.grading.gym import has_form
from nmoe.grading.workers.pool import WorkerPool
from nmoe.types import Problem, Verdict

MakePool = Callable[..., Pool]

needs_package = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason='reasoning-gym is not installed: pip install -e ".[environments]"'
)


# With every one whose verifier would evaluate the answer.
DATASETS = ["leg_counting", "countdown", "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "puzzle24"]
DATASETS += [
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "word_sorting",
    "mini_sudoku",
]


def table(dataset: str, **more: object) -> dict[str, object]:
    return {"type": "reasoning_gym", "dataset": dataset, **more}


def verify(problem: Problem, answer: str) -> Verdict:
    return asyncio.run(TASKS["reasoning_gym"].verify(problem, Attempt(answer)))


def test_without_the_package_the_error_says_what_to_install(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise gym.PackageNotFoundError(name)

    monkeypatch.setattr(gym, "version", absent)
    with pytest.raises(UserError, match=r"needs the package reasoning-gym: pip install reasoning-gym==0\.1\.25"):
        make_pool(table("leg_counting"))


def test_another_version_is_refused(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "version", lambda name: "9.9")
    with pytest.raises(UserError, match=r"reasoning-gym 9\.9 is installed.*reasoning-gym==0\.1\.25"):
        make_pool(table("leg_counting"))


def test_seed_and_size_are_the_pools(make_pool: MakePool) -> None:
    with pytest.raises(UserError, match="must not have 'seed'"):
        make_pool(table("leg_counting", config={"seed": 3}))


@needs_package
def test_problems_are_reproducible_and_a_position_goes_on(make_pool: MakePool) -> None:
    settings = table("chain_sum", config={"min_terms": 3, "max_terms": 3}, seed=5)
    problems = make_pool(settings).take(150)
    assert problems == make_pool(settings).take(150)
    assert [problem.id for problem in problems] == [f"demo/{position}" for position in range(150)]
    assert len({problem.question for problem in problems}) > 140
    assert problems != make_pool(settings | {"seed": 6}).take(150)
    pool = make_pool(settings)
    pool.take(100)
    resumed = make_pool(settings)
    resumed.load_state(pool.state())
    assert resumed.take(50) == problems[100:]
    with pytest.raises(UserError, match="another pool"):
        make_pool(settings | {"config": {}}).load_state(pool.state())


@needs_package
def test_splits_share_no_question(make_pool: MakePool) -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    seen = {
        split: {
            problem.question
            for seed in (0, 1)
            for problem in make_pool(table("chain_sum", split=split, seed=seed, config=config)).take(120)
        }
        for split in ("train", "eval")
    }
    assert seen["train"]
    assert seen["eval"]
    assert not seen["train"] & seen["eval"]


@needs_package
def test_max_examples(make_pool: MakePool) -> None:
    pool = make_pool(table("leg_counting", max_examples=5))
    assert pool.size == 5
    assert {problem.id for problem in pool.take(5)} == {problem.id for problem in pool.take(5)}


@needs_package
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (table("no_such_set"), "no dataset 'no_such_set'; it has .*leg_counting"),
        (
            table("leg_counting", config={"legs": 3}),
            "leg_counting refuses config: .*unexpected keyword argument 'legs'",
        ),
        (table("leg_counting", config={"min_animals": 9, "max_animals": 2}), "leg_counting refuses config"),
        (table("coin_flip", config={"min_trials": 1, "max_trials": 1}, split="eval"), None),
    ],
)
def test_settings_that_do_not_fit(make_pool: MakePool, settings: dict[str, object], message: str | None) -> None:
    if message is None:
        assert make_pool(settings).take(1)
        return
    with pytest.raises(UserError, match=message):
        make_pool(settings)


@needs_package
@pytest.mark.parametrize("dataset", DATASETS)
def test_golds_are_correct_and_answers_are_no_code(make_pool: MakePool, dataset: str, tmp_path: Path) -> None:
    problem = make_pool(table(dataset)).take(3)[2]
    right = verify(problem, problem.gold)
    assert (right.outcome, right.score, right.layer) == ("correct", 1.0, "score_answer")
    mark = tmp_path / "mark"
    for code in (
        f"open({str(mark)!r}, 'w')",
        f"__import__('os').system('touch {mark}')",
        f"[open({str(mark)!r}, 'w')]",
        f"[c for c in __import__('pathlib').Path({str(mark)!r}).touch() or '']",
        f"exec('open({str(mark)!r}, chr(119))')",
        "[" * 500,
        "\ud800\0",
        "",
    ):
        verdict = verify(problem, code)
        assert verdict.outcome == "incorrect"
        assert verdict.score < 1
    assert not mark.exists()


@needs_package
def test_an_answer_that_takes_for_ever_is_incorrect(make_pool: MakePool) -> None:
    verdict = verify(make_pool(table("countdown")).take(1)[0], "9**9**9**9")
    assert verdict == Verdict("incorrect", 0.0, "score_answer", "deadline: took longer than the deadline")


@pytest.mark.parametrize(("broken", "expected"), [("answer", 0.0), ("verifier", None)])
def test_a_verifier_that_raises(monkeypatch: pytest.MonkeyPatch, broken: str, expected: float | None) -> None:
    """On an answer: that is wrong. On its own gold answer too: nobody was judged, and it comes through."""

    class Puzzle:
        def __getitem__(self, index: int) -> dict[str, str]:
            return {"question": "?", "answer": "4"}

        def score_answer(self, answer: str, entry: dict[str, str]) -> float:
            if broken == "verifier":
                raise OSError("the word list is gone")
            return float(int(answer) == 4)

    monkeypatch.setattr(gym, "_dataset", lambda *_: Puzzle())
    assert broken == "verifier" or gym.score("x", "{}", 0, 1, 0, "4") == 1.0
    if expected is None:
        with pytest.raises(OSError, match="word list"):
            gym.score("x", "{}", 0, 1, 0, "four")
    else:
        assert gym.score("x", "{}", 0, 1, 0, "four") == expected


JUNK = ["xyzzy", "nan", "nan + nanj", "inf", "?", "None", "[xyzzy]", "{}", "()", "-987654321", "0.123454321"]
# Those that take seconds to make an entry, and `composite`, which is made of others.
SLOW = {"composite", "sudoku", "zebra_puzzles"}


# What a policy finds that writes around an answer.
AROUND = ["The answer is {}.", "{} junk", "junk {}", "{} or {}x", "{} // no", "{}\n{} ?", "foo: {}", "{} {} {}!"]


@needs_package
def test_no_dataset_pays_for_junk_nor_for_its_gold_inside_junk() -> None:
    """Every dataset of the package: answers that are none of any, and its right answer with more around it."""
    from reasoning_gym.factory import DATASETS

    # In a worker, because of what its warm-up replaces.
    pool = WorkerPool("nmoe.grading.gym:score", 1, deadline_s=60)
    makers = WorkerPool("nmoe.grading.gym:entries", 1, deadline_s=60)
    asked: list[tuple[str, str, float]] = []
    for name in sorted(DATASETS.keys() - SLOW):
        gold = makers.submit(name, "{}", 7, 1, 0, 1).result().value["entries"][0][1]
        asked += [(name, answer, 0.0) for answer in JUNK]
        asked += [(name, text.replace("{}", gold), 0.0) for text in AROUND if gold]
        asked += [(name, gold, 1.0)] if gold else []
    replies = [pool.submit(name, "{}", 7, 1, 0, answer) for name, answer, _ in asked]
    wrong = [one for one, reply in zip(asked, replies, strict=True) if reply.result().value != one[2]]
    pool.close()
    makers.close()
    assert wrong == []
    assert len({name for name, _, expected in asked if expected}) > 90


@pytest.mark.parametrize(
    ("dataset", "gold", "right", "wrong"),
    [
        ("quantum_lock", "A → B → A", ["A → B → A", "a->b->a", "A,B,A", "A B  A", "ABA"], ["A → B → A junk", "BANANA: A → B → A"]),
        ("time_intervals", "67 days", ["67 days", "67"], ["67 junk", "67 bananas days"]),
        ("time_intervals", "3 days, 01:04", ["3 days, 01:04"], ["3 days, 01:04, or 9 days", "-3 days, 01:04"]),
        ("gsm_symbolic", "1288", ["1288", "1,288", "1288.0"], ["-1288", "1288 or 3", "3, 1288", "1.288"]),
        ("cryptarithm", "A=1,B=2", ["A=1,B=2", "B=2, A=1"], ["A=1,B=2,A=3", "A=1,B=2,"]),
        ("word_sorting", "a, b", ["a, b", "a,b"], ["a, b, c", "A, b"]),
        ("spell_backward", "olleh", ["olleh", "OLLEH"], ["olleh0", "ollehh"]),
        ("knights_knaves", "Al is a hero, and Bo is a fool.", ["Al is a hero, and Bo is a fool", "Bo is a fool, Al is a hero"], ["Al is a hero, and Bo is a fool, and Al is a fool", "junk. Al is a hero, and Bo is a fool"]),  # noqa: E501
        ("fraction_simplification", r"$\frac{1}{2}$", [r"$\dfrac{1}{2}$", "1/2", "$1/2$"], ["$1/2", "1/2 x"]),
        ("advanced_geometry", "(1.5, -2.0)", ["(1.5,-2)", "16.9°"], ["(1.5, -2.0)0", "1.5, -2.0)"]),
        ("number_sorting", "['-2.5', '3']", ["['-2.5', '3']", "[-2.5, 3.0]"], ["['-2.49', '3']", "['3', '-2.5']"]),
        ("survo", "1 2\n3 4", ["1 2\n3 4"], ["1 2\n3 4 junk"]),
    ],
)  # fmt: skip
def test_the_form_of_a_whole_answer(dataset: str, gold: str, right: list[str], wrong: list[str]) -> None:
    assert [answer for answer in right if not has_form(dataset, answer, gold)] == []
    assert [answer for answer in wrong if has_form(dataset, answer, gold)] == []


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("quantum_lock", "A" + "  B" * 400 + " !"),
        ("advanced_geometry", "1" * 10_000 + "!"),
        ("gsm_symbolic", "1" * 10_000 + "!"),
        ("polynomial_equations", "1" * 10_000 + "!"),
        ("tower_of_hanoi", "Move disk 1 from Peg 1 to Peg 2" + "\n" * 10_000 + "!"),
    ],
)
def test_the_form_of_a_hostile_answer_takes_no_time(dataset: str, answer: str) -> None:
    started = time.thread_time()
    assert not has_form(dataset, answer, "")
    assert time.thread_time() - started < 0.2


@needs_package
@pytest.mark.parametrize(
    ("dataset", "wrong"), [("coin_flip", "0"), ("game_of_life_halting", "xyzzy"), ("complex_arithmetic", "nan")]
)
def test_repaired_verifiers_still_accept_the_gold(dataset: str, wrong: str) -> None:
    for index in range(4):
        entry = gym._dataset(dataset, "{}", 7, 8)[index]
        assert gym.score(dataset, "{}", 7, 8, index, str(entry["answer"])) == 1.0
        assert gym.score(dataset, "{}", 7, 8, index, wrong) == 0.0


@needs_package
def test_partial_scores_are_kept_where_the_pool_asks_for_them(make_pool: MakePool) -> None:
    for partial in (False, True):
        problem = make_pool(table("countdown", partial=partial)).take(1)[0]
        verdict = verify(problem, "1 + 1")
        assert verdict.outcome == "incorrect"
        assert (0 < verdict.score < 0.1) if partial else verdict.score == 0
        # The gold inside another text is no part of a solution.
        problem = make_pool(table("leg_counting", partial=partial)).take(1)[0]
        assert verify(problem, problem.gold + "0").score == 0
        assert verify(problem, problem.gold).score == 1


@needs_package
def test_an_environment_has_held_out_problems(environment: Callable[..., Environment]) -> None:
    made = environment('[task_pool]\ntype = "reasoning_gym"\ndataset = "chain_sum"\nconfig = {min_terms = 2}\n')
    held_out = made.held_out()
    assert {p.question for p in held_out.pool.take(30)}.isdisjoint({p.question for p in made.pool.take(200)})
