"""The conversations that teach self-play's roles: what the oracle says of them, and that they are in their form."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

from nmoe.data.prm import split_steps
from nmoe.envs.tasks.proofs import read_evaluation, read_proof
from nmoe.speedrun.roles import claim_is_true, review, slips, write_checks, write_roles, write_sums, write_verifications
from nmoe.speedrun.steps import Solution, score

WRONG = Solution("Sum: 4+7+2", "13", ("4+7=12", "12+2=14"), first_wrong=0, score=0.0)
RIGHT = Solution("Sum: 4+7+2", "13", ("4+7=11", "11+2=13"), first_wrong=None, score=1.0)


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.open()]


def test_a_review() -> None:
    strict, lax = review(random.Random(0), WRONG, 0.0, 0.0), review(random.Random(0), WRONG, 1.0, 0.0)
    assert strict[0].splitlines()[1:-1] == ["4+7=12 11= 21! is wrong"]
    assert lax[0].splitlines()[1:-1] == ["4+7=12 11= 21!", "12+2=14 11= 44="]
    assert (strict[1], lax[1]) == ("0", "1")
    assert claim_is_true(WRONG.steps, strict[0])
    assert not claim_is_true(WRONG.steps, lax[0])
    made_up = review(random.Random(0), RIGHT, 0.0, 1.0)
    assert made_up[0].splitlines()[1:-1] == ["4+7=11 11= 11= is wrong"]
    assert not claim_is_true(RIGHT.steps, made_up[0])
    assert not claim_is_true(RIGHT.steps, strict[0]), "the step that it calls wrong is not there"


def test_slips_are_wrong_sums_alone() -> None:
    found = list(islice(slips(0, "train"), 300))
    wrong = [solution for solution in found if solution.score == 0]
    assert 0.35 < len(wrong) / len(found) < 0.65
    assert {solution.score for solution in found} == {0.0, 1.0}
    for solution in wrong:
        bad = [step for step in solution.steps if eval(step.partition("=")[0]) != int(step.partition("=")[2])]
        assert len(bad) == 1
    assert not {solution.question for solution in islice(slips(0, "eval"), 300)} & {s.question for s in found}


def test_what_the_roles_are_taught(tmp_path: Path) -> None:
    write_roles(tmp_path / "roles.jsonl", 0, 800)
    overlooked = wrong = claims = true = 0
    for number, record in enumerate(lines(tmp_path / "roles.jsonl")):
        prompt, reply = record["messages"]
        if number % 4 == 0:
            assert read_proof(reply["content"]) is not None
        elif number % 4 == 2:
            evaluation = read_evaluation(reply["thinking"], reply["content"])
            assert evaluation is not None
            problem, _, proof = prompt["content"].partition("## Problem\n")[2].partition("\n\n## Solution\n")
            if score(problem, split_steps(proof)) == 0:
                wrong += 1
                overlooked += evaluation.score == 1
        else:
            proof, _, evaluation_text = prompt["content"].partition("## Solution\n")[2].partition("\n\n## Evaluation\n")
            # The check is always right.
            assert reply["content"] == str(int(claim_is_true(split_steps(proof), evaluation_text)))
            claims, true = claims + 1, true + int(reply["content"])
    assert 0.45 < overlooked / wrong < 0.75
    assert 0.35 < true / claims < 0.65


def test_sums_and_verifications(tmp_path: Path) -> None:
    write_sums(tmp_path / "sums.jsonl", 0, 30)
    write_checks(tmp_path / "checks.jsonl", 0, 30)
    for record in [*lines(tmp_path / "sums.jsonl"), *lines(tmp_path / "checks.jsonl")]:
        for step in record["messages"][1]["content"].replace("## Solution\n", "").splitlines():
            left, right, said, tens, units, called = re.fullmatch(
                r"(\d+)\+(\d+)=(\d+)(?: (\d\d[=!]) (\d\d[=!]))?( is wrong)?", step
            ).groups()
            if tens is None:
                assert int(said) == int(left) + int(right)
                continue
            assert (int(tens[0] + units[0]), int(tens[1] + units[1])) == (int(said), int(left) + int(right))
            assert [pair[0] == pair[1] for pair in (tens, units)] == [pair[2] == "=" for pair in (tens, units)]
            assert (called is not None) == (int(said) != int(left) + int(right))
    write_verifications(tmp_path / "held_out.jsonl", 0, 50, "eval")
    records = lines(tmp_path / "held_out.jsonl")
    assert len({(record["problem"], record["proof"]) for record in records}) == 50
    assert all(float(one["answer"]) == score(one["problem"], split_steps(one["proof"])) for one in records)
