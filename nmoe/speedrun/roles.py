"""Writes conversations that teach a small model the three roles of self-play: generator, verifier and meta-verifier.

The problems and solutions come from `nmoe.speedrun.steps`; the only errors are wrong sums. Generator and verifier are
weak on purpose, so that self-play can improve them:

- the generator makes an error in half of its solutions, and misses it in most of its self-evaluations;
- a verifier recomputes the steps, misses errors at the rate OVERLOOKS, and calls right steps wrong at the rate FALSE_ALARM;
- the meta-verifier recomputes the one sum that is claimed to be wrong, and always judges the claim correctly.

Self-play relies on this: checking one claim is easier than finding all errors. These texts are only used before
self-play.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.proofs import CLOSING, OPENING, SELF_EVALUATION, SOLUTION
from nmoe.speedrun.steps import Solution, Split, solutions, solve, sum_problem

# Shares of errors that a verifier misses, of right steps that it calls wrong, and of errors that a generator admits.
OVERLOOKS, FALSE_ALARM, OWNS_UP = 0.6, 0.05, 0.3
# Numbers of additions.
SHORTEST, LONGEST = 2, 3
_CLAIM = re.compile(r"(\d{1,9}\+\d{1,9}=\d{1,9}) [\d=! ]{1,20} is wrong")


def slips(seed: int, split: Split) -> Iterator[Solution]:
    """Yields solutions without end, about half of which have one wrong sum and no other error."""
    part = 0
    while True:
        for solution in solutions(
            seed * 100_003 + part, 1000, split, wrong=0.7, unfinished=0.0, additions=(SHORTEST, LONGEST)
        ):
            if solution.first_wrong is None or _is_slip(solution):
                yield solution
        part += 1


def review(rng: random.Random, solution: Solution, overlooks: float, false_alarm: float) -> tuple[str, str]:
    """Returns a review of a solution and its score, "1" or "0", by a reviewer who makes errors at the given rates.

    The reviewer recomputes every step, writes the digits beside it, and stops at the first step that it calls wrong:

        11+2=13 11= 33=
        13+5=16 11= 68! is wrong
    """
    lines: list[str] = []
    for step in solution.steps:
        lines.append(_checked(step))
        if rng.random() < ((1 - overlooks) if _is_wrong(step) else false_alarm):
            return _evaluation([*lines[:-1], f"{lines[-1]} is wrong"], "0"), "0"
    return _evaluation(lines, "1"), "1"


def claim_is_true(steps: Sequence[str], evaluation: str) -> bool:
    """Returns whether the step that a review calls wrong is in the solution and is a wrong sum."""
    claim = _CLAIM.search(evaluation)
    return claim is not None and claim[1] in steps and _is_wrong(claim[1])


def write_sums(path: Path, seed: int, count: int) -> None:
    """Writes `count` conversations that solve sums correctly, without instructions, to teach the model addition."""
    rng = random.Random(f"sums/{seed}")
    with path.open("w") as file:
        for _ in range(count):
            _write(file, *_solved(rng))


def write_checks(path: Path, seed: int, count: int) -> None:
    """Writes `count` conversations, half of which distinguish right sums from wrong ones, correctly and without instructions.

    The other half solves sums as in `write_sums`, so that the model does not forget addition.
    """
    rng = random.Random(f"checks/{seed}")
    with path.open("w") as file:
        for number in range(count):
            _write(file, *(_checks if number % 2 else _solved)(rng))


def write_roles(path: Path, seed: int, count: int) -> None:
    """Writes `count` conversations in the three roles; half of them are the meta-verifier's, which has to be reliable."""
    rng, source = random.Random(f"roles/{seed}"), slips(seed, "train")
    with path.open("w") as file:
        for number in range(count):
            solution = next(source)
            role = (_generator, _meta_verifier, _verifier, _meta_verifier)[number % 4]
            _write(file, *role(rng, solution, source))


def write_verifications(path: Path, seed: int, count: int, split: Split) -> None:
    """Writes `count` different solutions with their true scores, as records of the task proof_verification, for evaluation."""
    found: dict[tuple[str, str], Solution] = {}
    for solution in slips(seed, split):
        found.setdefault((solution.question, solution.text), solution)
        if len(found) == count:
            break
    with path.open("w") as file:
        for solution in found.values():
            record = {"problem": solution.question, "proof": solution.text, "answer": f"{solution.score:g}"}
            file.write(json.dumps(record) + "\n")


Conversation = tuple[str, str | None, str]


def _solved(rng: random.Random) -> Conversation:
    question, _ = sum_problem(rng, "train", (SHORTEST, LONGEST + 1))
    steps = "\n".join(solve(question))
    return question, None, f"{SOLUTION}\n{steps}"


def _checks(rng: random.Random) -> Conversation:
    said = [_sum(rng) for _ in range(6)]
    marks = [_checked(step) + (" is wrong" if _is_wrong(step) else "") for step in said]
    return "Check: " + " ".join(said), None, "\n".join(marks)


def _generator(rng: random.Random, solution: Solution, source: Iterator[Solution]) -> Conversation:
    evaluation, _ = review(rng, solution, 1 - OWNS_UP, 0.0)
    prompt, _, _ = TASKS["proof_generation"].pose(solution.question, "", {})
    return prompt, None, f"{SOLUTION}\n{solution.text}\n\n{SELF_EVALUATION}\n{evaluation}"


def _verifier(rng: random.Random, solution: Solution, source: Iterator[Solution]) -> Conversation:
    evaluation, score = review(rng, solution, OVERLOOKS, FALSE_ALARM)
    prompt, _, _ = TASKS["proof_verification"].pose(solution.question, "", {"proof": solution.text})
    return prompt, evaluation, score


def _meta_verifier(rng: random.Random, solution: Solution, source: Iterator[Solution]) -> Conversation:
    """Makes a conversation in which the meta-verifier judges a claim; about half of the claims are true."""
    while True:
        wrong = solution.first_wrong is not None
        evaluation, score = review(rng, solution, 0.0, 0.0 if wrong else 0.5)
        if score == "0":
            break
        solution = next(source)
    prompt, _, _ = TASKS["meta_verification"].pose(
        solution.question, "", {"proof": solution.text, "evaluation": evaluation}
    )
    claim = _CLAIM.search(evaluation)
    assert claim is not None, "a review that gives 0 claims an error"
    step = claim[1]
    return prompt, _checked(step), "1" if _is_wrong(step) else "0"


def _evaluation(lines: list[str], score: str) -> str:
    return "\n".join([OPENING, *lines, f"{CLOSING} {score}"])


def _sum(rng: random.Random) -> str:
    """Returns a random sum as a text, such as "13+5=18", which is wrong half of the time."""
    left, right = rng.randint(1, 30), rng.randint(1, 9)
    away = rng.choice([change for change in (-10, -2, -1, 1, 2, 10) if left + right + change > 0])
    return f"{left}+{right}={left + right + (away if rng.random() < 0.5 else 0)}"


def _checked(step: str) -> str:
    """Returns the step followed by its result and the right one, compared digit by digit: `13+5=16 11= 68!`.

    A small model soon learns whether two adjacent digits are equal, but hardly ever whether two numbers are
    (docs/guides/selfplay.md).
    """
    left, right, result = _numbers(step)
    pairs = zip(f"{result:02d}", f"{left + right:02d}", strict=True)
    return f"{step} " + " ".join(f"{said}{true}{'=' if said == true else '!'}" for said, true in pairs)


def _is_wrong(step: str) -> bool:
    left, right, result = _numbers(step)
    return left + right != result


def _is_slip(solution: Solution) -> bool:
    """Returns whether every step starts from the result of the step before, and adds the next number."""
    total, *numbers = map(int, re.findall(r"\d+", solution.question))
    if len(numbers) != len(solution.steps):
        return False
    for number, step in zip(numbers, solution.steps, strict=True):
        left, right, result = _numbers(step)
        if (left, right) != (total, number):
            return False
        total = result
    return True


def _numbers(step: str) -> tuple[int, int, int]:
    left, right, result = map(int, re.findall(r"\d+", step))
    return left, right, result


def _write(file: Any, prompt: str, reasoning: str | None, answer: str) -> None:
    reply: dict[str, str] = {"role": "assistant", "content": answer}
    if reasoning is not None:
        reply["thinking"] = reasoning
    file.write(json.dumps({"messages": [{"role": "user", "content": prompt}, reply]}) + "\n")


# The stages of the roles' warm-up, in order: conversations, their number, tokens of a step, learning rate.
WARM_UP = {
    "sums": (write_sums, 20_000, 4096, 4e-3),
    "checks": (write_checks, 30_000, 8192, 3e-3),
    "roles": (write_roles, 8_000, 12288, 3e-3),
}
