"""Synthetic sums solved step by step, right or with one planted error, with which a small verifier can be trained.

A solution adds one number per step, and an oracle finds the first wrong step:

    Sum: 4+7+2+5     4+7=11   11+2=13   13+5=18    right:       no wrong step, score 1
                     4+7=11   11+2=13              unfinished:  no wrong step, score 0.5
                     4+7=11   12+2=14   14+5=19    planted:     the second step is wrong, score 0

After a planted error the solution continues from its wrong value, as a model would. The numbers of a problem, in any
order, decide whether it belongs to the train or to the eval split (`nmoe.envs.pools.generated.split_of`), so that no
problem is in both.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.numeric import SumTask
from nmoe.envs.tasks.proofs import CLOSING, OPENING

Split = Literal["train", "eval"]

# Numbers of additions.
SHORTEST, LONGEST = 3, 5
# Shares of solutions; the others are right.
WRONG, UNFINISHED = 0.5, 0.1

# How many solutions `write_domain` labels, and how many problems and solutions it writes.
LABELLED, PROBLEMS, SOLUTIONS = 40_000, 2_000, 40_000
# Share of the solutions to pretrain on that share a misconception.
MISCONCEIVED = 0.45

# What can be wrong in a step, given the sum so far and the number that is next: see `_wrong_step`.
FAULTS = ("carry", "slip", "total", "number", "skip")

_ADDITION = re.compile(r"(\d{1,9})\+(\d{1,9})=(\d{1,9})")
_RESTATEMENT = re.compile(r"(\d{1,9}) so far")


@dataclass(frozen=True)
class Solution:
    """A solution with its labels: `Solution("Sum: 4+7+2+5", "18", ("4+7=11", "12+2=14", "14+5=19"), first_wrong=1, score=0.0)`.

    `first_wrong` is the index of the first wrong step, counted from 0; None if no step is wrong.
    """

    question: str
    gold: str
    steps: tuple[str, ...]
    first_wrong: int | None
    score: float

    @property
    def text(self) -> str:
        """The solution as a text, with one step per line."""
        return "\n".join(self.steps)

    @property
    def ratings(self) -> tuple[int, ...]:
        """The ratings of the steps as in PRM800K: 1 for progress, 0 for a restatement, -1 for a wrong step, which is
        the last one rated."""
        judged = self.steps if self.first_wrong is None else self.steps[: self.first_wrong]
        right = tuple(0 if _RESTATEMENT.fullmatch(step) else 1 for step in judged)
        return right if self.first_wrong is None else (*right, -1)


def first_wrong(question: str, steps: Sequence[str]) -> int | None:
    """Returns the index of the first wrong step; None if all are right. Accepts any texts as steps.

    A step is wrong if it is no addition, adds another number than the next one, starts from another total, has a wrong
    result, or comes after the last number.
    """
    numbers = _numbers(question)
    total, used = numbers[0], 1
    for index, step in enumerate(steps):
        if restated := _RESTATEMENT.fullmatch(step):
            if int(restated[1]) != total:
                return index
            continue
        added = _ADDITION.fullmatch(step)
        if added is None or used == len(numbers):
            return index
        if [int(added[1]), int(added[2]), int(added[3])] != [total, numbers[used], total + numbers[used]]:
            return index
        total, used = total + numbers[used], used + 1
    return None


def score(question: str, steps: Sequence[str]) -> float:
    """Returns the true score of a solution: 0 with a wrong step or without steps, 1 if it adds all numbers, else 0.5."""
    if not steps or first_wrong(question, steps) is not None:
        return 0.0
    return 1.0 if _used(steps) == len(_numbers(question)) else 0.5


def solve(question: str) -> list[str]:
    """Returns the steps of the right solution."""
    return _continued(_numbers(question), 1, _numbers(question)[0])


def solutions(
    seed: int,
    count: int,
    split: Split,
    *,
    wrong: float = WRONG,
    unfinished: float = UNFINISHED,
    restated: float = 0.0,
    additions: tuple[int, int] = (SHORTEST, LONGEST),
) -> Iterator[Solution]:
    """Yields `count` solutions of problems in a split; the same arguments give the same solutions.

    The share `wrong` has one planted error, and the share `unfinished` ends early. After the share `restated` of steps
    before the error, a neutral step repeats the total ("13 so far"). `additions` are the fewest and the most steps.
    """
    rng = random.Random(f"steps/{split}/{seed}")
    for _ in range(count):
        question, gold = sum_problem(rng, split, additions)
        numbers, steps = _numbers(question), solve(question)
        at = None
        draw = rng.random()
        if draw < wrong:
            at = rng.randrange(len(steps))
            steps = steps[:at] + _planted(rng, numbers, at)
        elif draw < wrong + unfinished:
            steps = steps[: rng.randrange(1, len(steps))]
        written: list[str] = []
        for index, step in enumerate(steps):
            written.append(step)
            if (at is None or index < at) and restated and rng.random() < restated:
                written.append(f"{step.partition('=')[2]} so far")
        yield Solution(question, gold, tuple(written), first_wrong(question, written), score(question, written))


def sum_problem(rng: random.Random, split: Split, additions: tuple[int, int] = (SHORTEST, LONGEST)) -> tuple[str, str]:
    """Draws a new problem of a split; returns its question and its right answer."""
    while True:
        question, gold = SumTask().generate(rng, rng.randint(*additions))
        if split_of("sum", question) == split:
            return question, gold


def step_texts(seed: int, count: int) -> Iterator[str]:
    """Yields prompts with replies as plain texts, for `count` solutions and every kind of judgement, to train the tokenizer on."""
    rng = random.Random(f"step texts/{seed}")
    for solution in solutions(seed, count, "train", restated=0.1):
        evaluation = evaluation_text(solution)
        record = {"steps": list(solution.steps), "solution": solution.text, "evaluation": evaluation}
        score_text = f"{solution.score:g}"
        for kind, gold in (
            ("prm_step", "+"),
            ("prm_solution", score_text),
            ("proof_verification", score_text),
            ("meta_verification", score_text),
        ):
            prompt, _, _ = TASKS[kind].pose(solution.question, gold, record)
            yield f"user {prompt} assistant analysis {evaluation} assistant final {rng.choice(('+', '0', '-', '0.5', '1'))}"
        yield f"user {solution.question} assistant final ## Solution\n{solution.text}\n\n## Self Evaluation\n{evaluation}"


def evaluation_text(solution: Solution) -> str:
    """Returns the correct evaluation of a solution, in DeepSeekMath-V2's format."""
    if solution.first_wrong is not None:
        found = f"Step {solution.first_wrong + 1} is wrong: {solution.steps[solution.first_wrong]}"
    elif solution.score < 1:
        found = "It is not finished."
    else:
        found = "Every step is right."
    return f"{OPENING}\n{found}\n{CLOSING} {solution.score:g}"


def write_domain(out: Path, seed: int) -> None:
    """Writes the data for verifier.toml, sums.toml and selfplay.toml: `prm800k/` with both phases, `sums.jsonl` and
    `problems.json`."""
    (out / "prm800k").mkdir(exist_ok=True)
    write_prm800k(out / "prm800k/phase1_train.jsonl", seed, LABELLED // 40, "train", phase=1)
    write_prm800k(out / "prm800k/phase2_train.jsonl", seed, LABELLED, "train", phase=2)
    write_prm800k(out / "prm800k/phase2_test.jsonl", seed, LABELLED // 40, "eval", phase=2)
    write_problems(out / "problems.json", seed, PROBLEMS, "train")
    write_solutions(out / "sums.jsonl", seed, SOLUTIONS, "train")


def write_prm800k(path: Path, seed: int, count: int, split: Split, phase: Literal[1, 2] = 2) -> None:
    """Writes `count` labelled solutions in the format of PRM800K (https://github.com/openai/prm800k, arXiv:2305.20050).

    In phase 1, every step has several completions, of which one was chosen to continue from, or a person wrote the
    step; the labelling ends with the solution. In phase 2, there is one completion per step, up to the first wrong one,
    and the whole generated solution. As in PRM800K, a few rows are quality control or screening, some completions are
    flagged, and some labelers gave up.
    """
    rng = random.Random(f"prm800k/{phase}/{split}/{seed}")
    wrong = WRONG if phase == 2 else 0.0
    with path.open("w") as file:
        for index, solution in enumerate(solutions(seed, count, split, wrong=wrong, unfinished=0.0, restated=0.1)):
            steps = [
                _prm800k_step(rng, solution, at, phase) for at in range(len(solution.ratings))
            ]  # nothing is labelled after the first wrong step
            reason = "solution" if solution.first_wrong is None else "found_error"
            if rng.random() < 0.02:
                steps, reason = steps[:1], rng.choice(("give_up", "bad_problem"))
            question: dict[str, Any] = {"problem": solution.question, "ground_truth_answer": solution.gold}
            if phase == 2:
                question["ground_truth_solution"] = None
                question["pre_generated_steps"] = list(solution.steps)
                question["pre_generated_answer"] = solution.steps[-1].partition("=")[2]
                question["pre_generated_verifier_score"] = round(rng.random(), 6)
            record = {
                "labeler": f"{rng.randrange(2**32):08x}-0000-4000-8000-{rng.randrange(2**48):012x}",
                "timestamp": f"2023-01-22T04:{index // 60 % 60:02d}:{index % 60:02d}.052924",
                "generation": rng.randrange(10) if phase == 2 else None,
                "is_quality_control_question": rng.random() < 0.03,
                "is_initial_screening_question": rng.random() < 0.02,
                "question": question,
                "label": {"steps": steps, "total_time": rng.randrange(20_000, 300_000), "finish_reason": reason},
            }
            file.write(json.dumps(record) + "\n")


def _prm800k_step(rng: random.Random, solution: Solution, at: int, phase: int) -> dict[str, Any]:
    text, rating = solution.steps[at], solution.ratings[at]
    completions = [{"text": text, "rating": rating, "flagged": rng.random() < 0.01}]
    if phase == 2:
        # Where the last completion is wrong, none was good enough to continue from.
        return {"completions": completions, "human_completion": None, "chosen_completion": None if rating < 0 else 0}
    if rating > 0 and _ADDITION.fullmatch(text):
        left, right, result = map(int, _ADDITION.fullmatch(text).groups())  # type: ignore[union-attr]
        for _ in range(rng.randrange(3)):
            other = f"{left}+{right}={result + rng.choice((-10, -2, -1, 1, 2, 10))}"
            completions.append({"text": other, "rating": -1, "flagged": False})
    if len(completions) > 1 and rng.random() < 0.1:  # only wrong ones were offered, and the labeler wrote the step
        human = {"text": text, "rating": None, "source": "human", "flagged": False, "corrected_rating": None}
        return {"completions": completions[1:], "human_completion": human, "chosen_completion": None}
    chosen = completions[0]
    rng.shuffle(completions)
    return {"completions": completions, "human_completion": None, "chosen_completion": completions.index(chosen)}


def write_solutions(path: Path, seed: int, count: int, split: Split, misconceived: float = MISCONCEIVED) -> None:
    """Writes `count` solved problems as plain texts, to pretrain a policy on.

    The share `misconceived` forgets every carry, so that the policy has a systematic fault, which a majority of its
    samples may share.
    """
    rng = random.Random(f"solutions/{split}/{seed}")
    with path.open("w") as file:
        for _ in range(count):
            question, _ = sum_problem(rng, split)
            steps = _without_tens(question) if rng.random() < misconceived else solve(question)
            text = "\n".join([question, *steps])
            file.write(json.dumps({"text": text}) + "\n")


def _without_tens(question: str) -> list[str]:
    """Returns the steps of a solution that forgets every carry but keeps the tens: 8+5=3, 18+5=13."""
    total, *numbers = _numbers(question)
    steps = []
    for number in numbers:
        result = total - total % 10 + (total + number) % 10
        steps.append(f"{total}+{number}={result}")
        total = result
    return steps


def write_problems(
    path: Path, seed: int, count: int, split: Split, additions: tuple[int, int] = (SHORTEST, LONGEST)
) -> None:
    """Writes `count` different problems in the format of DeepSeekMath-V2's inputs.

    The file is a JSON list of objects with id, question, answer, contest and problem_idx.
    """
    rng = random.Random(f"problems/{split}/{seed}")
    found: dict[str, str] = {}
    while len(found) < count:
        question, gold = sum_problem(rng, split, additions)
        found[question] = gold
    records = [
        {"id": f"sums-{index}", "question": question, "answer": gold, "contest": "sums", "problem_idx": str(index)}
        for index, (question, gold) in enumerate(found.items(), 1)
    ]
    path.write_text(json.dumps(records, indent=1) + "\n")


def _numbers(question: str) -> list[int]:
    return list(map(int, question.removeprefix("Sum: ").split("+")))


def _used(steps: Sequence[str]) -> int:
    return 1 + sum(_ADDITION.fullmatch(step) is not None for step in steps)


def _continued(numbers: Sequence[int], used: int, total: int) -> list[str]:
    steps = []
    for number in numbers[used:]:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    return steps


def _planted(rng: random.Random, numbers: Sequence[int], at: int) -> list[str]:
    """Returns a wrong step in place of the one at index `at`, and the steps that follow from it."""
    total, number = sum(numbers[: at + 1]), numbers[at + 1]
    used = at + 2
    faults = [fault for fault in FAULTS if _possible(fault, numbers, at)]
    match rng.choice(faults):
        case "carry":  # the ten is forgotten
            left, right, result = total, number, total + number - 10
        case "slip":
            away = [change for change in (-10, -2, -1, 1, 2, 10) if total + number + change > 0]
            left, right, result = total, number, total + number + rng.choice(away)
        case "total":  # starts from a total that no step has
            away = [change for change in (-10, -1, 1, 10) if total + change > 0]
            left, right = total + rng.choice(away), number
            result = left + right
        case "number":
            left, right = total, rng.choice([other for other in range(1, 10) if other != number])
            result = left + right
        case _:  # "skip": a number is left out
            left, right, used = total, numbers[at + 2], at + 3
            result = left + right
    return [f"{left}+{right}={result}", *_continued(numbers, used, result)]


def _possible(fault: str, numbers: Sequence[int], at: int) -> bool:
    total, number = sum(numbers[: at + 1]), numbers[at + 1]
    if fault == "carry":
        return total % 10 + number >= 10
    if fault == "skip":
        return at + 2 < len(numbers) and numbers[at + 2] != number
    return True
