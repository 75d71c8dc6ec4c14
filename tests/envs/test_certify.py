"""Passports: an environment without fault passes, and each fault is shown with the very answer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nmoe
from nmoe.cli.command import app
from nmoe.config import registry
from nmoe.envs.attacks.texts import Attack, Target, text_attacks, the_same
from nmoe.envs.certify import certify
from nmoe.envs.passport import Passport
from nmoe.types import Problem


class Doubled(nmoe.Task):
    """Doubling a number, graded as it should be."""

    def generate(self, rng: random.Random, difficulty: int) -> dict[str, int]:
        return {"number": rng.randrange(10_000)}

    def prompt(self, record: nmoe.Record) -> str:
        return f"Double {record['number']}."

    def gold(self, record: nmoe.Record) -> str:
        return str(2 * record["number"])

    def grade(self, record: nmoe.Record, answer: str) -> bool:
        return answer.strip() == self.gold(record)


class Anywhere(Doubled):
    def grade(self, record: nmoe.Record, answer: str) -> bool:
        return self.gold(record) in answer


class Careless(Doubled):
    def grade(self, record: nmoe.Record, answer: str) -> bool:
        return int(answer) == 2 * record["number"]


class Moody(Doubled):
    calls = 0

    def grade(self, record: nmoe.Record, answer: str) -> bool:
        Moody.calls += 1
        return super().grade(record, answer) and Moody.calls < 500


class Telling(Doubled):
    def prompt(self, record: nmoe.Record) -> str:
        return f"Double {record['number']}. <!-- answer: {self.gold(record)} -->"


class Refusing(Doubled):
    def grade(self, record: nmoe.Record, answer: str) -> bool:
        return super().grade(record, answer) and record["number"] % 2 == 0


def passport_of(tmp_path: Path, task: type, attacks: int = 300) -> Passport:
    [name] = registry.hand_over(task)
    path = tmp_path / "environment.toml"
    path.write_text(f'env_id = "doubled"\ntask = "{name}"\n')
    return certify(path, None, attacks)


def test_an_environment_without_fault_passes(tmp_path: Path) -> None:
    passport = passport_of(tmp_path, Doubled)
    tried = dict.fromkeys(("golds", "attacks", "repeatable", "prompt", "sandbox", "latency"), "pass")
    assert {row.name: row.status for row in passport.rows} == {**tried, "learnable": "not tried"}
    figures = passport.record()["rows"]
    assert figures["golds"]["paid"] == 64
    assert (figures["attacks"]["attacks"], figures["attacks"]["paid"]) == (300, 0)
    assert figures["attacks"]["kinds"] > 15
    assert figures["repeatable"]["verdicts"] == 364


@pytest.mark.parametrize(
    ("task", "row", "answer"),
    [
        (Anywhere, "attacks", "not {gold}"),
        (Careless, "attacks", "xyzzy"),
        (Telling, "prompt", "{gold}"),
        (Refusing, "golds", "{gold}"),
        (Moody, "repeatable", "{gold}"),
    ],
)
def test_a_fault_is_shown_with_the_answer(tmp_path: Path, task: type, row: str, answer: str) -> None:
    Moody.calls = 0
    passport = passport_of(tmp_path, task)
    assert passport.failed
    failed = {one.name: one for one in passport.rows if one.status == "fail"}
    assert row in failed
    assert failed[row].remedy
    if row == "golds":  # listed by the check of golds
        assert "not graded correct" in failed[row].said
        return
    shown = failed[row].examples
    assert shown
    if task is Anywhere:
        assert any(one.gold in one.answer != one.gold for one in shown)
    elif task is Careless:
        assert all("raised ValueError" in one.verdict or "TaskError" in one.verdict for one in shown)
    else:
        assert shown[0].answer == answer.format(gold=shown[0].gold)


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("5", "5.0", True),
        ("1,000", r"$\boxed{1000}$", True),
        (r"\frac{1}{2}", "0.5", True),
        ("Paris", " paris. ", True),
        ("B", "B. Paris", True),
        ("5", "50", False),
        ("5", "-5", False),
        ("05", "5 or 6", False),
        ("1/0", "2/0", False),
    ],
)
def test_the_same_answer_by_other_means(gold: str, answer: str, same: bool) -> None:
    assert the_same(gold, answer) is same


def test_attacks_never_hold_the_right_answer() -> None:
    problem = Problem("p/0", "gsm8k", "Ann has 3 boxes of 6 eggs, 18 in all. How many eggs has she?", "18", "p")
    attacks = text_attacks(Target(problem, "18", "19", ["18", "7", "42"]))
    assert len(attacks) == len({(one.text, one.form) for one in attacks}) > 150
    claimed = [one.text for one in attacks if one.claims]
    assert "18" not in claimed
    assert {"17", "19", "-18", "180", "81", "3", "6", "42"} <= set(claimed)
    assert Attack("a hedge or a denial", "It is not 18.", "message") in attacks
    assert text_attacks(Target(problem, "18", "19", ["18", "7", "42"])) == attacks


@pytest.mark.parametrize("others", [["#### 18", "#### 7"], ["#### 18"], []])
def test_the_gold_beside_nothing_is_no_attack(others: list[str]) -> None:
    """Of a live environment the right turn alone is known."""
    target = Target(Problem("p/0", "gsm8k", "What is 9 + 9?", "18", "p"), "#### 18", "", others)
    attacks = text_attacks(target)
    assert len(attacks) > 20
    alone = {"#### 18", "#### 18,", "either #### 18 or", "#### 18 or", r"\boxed{#### 18} \boxed{}"}
    assert [one for one in attacks if one.form != "reasoning" and one.text.strip() in alone] == []
    assert ("#### 18 or #### 7" in {one.text for one in attacks}) == (len(others) == 2)


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["env", "certify", "sort", "gsm8k", "--attacks", "40", "--json"])
    assert run.exit_code == 0
    sort, gsm8k = map(json.loads, run.stdout.splitlines())
    assert (sort["result"], gsm8k["result"]) == ("pass", "no data here")
    assert sort["rows"]["attacks"]["attacks"] == 40
    assert CliRunner().invoke(app, ["env", "certify", "gsm8k"]).exit_code == 2


def test_code_is_attacked_in_sandboxes() -> None:
    passport = certify(Path("code_fix"), None, 24)
    rows = {row.name: row for row in passport.rows}
    assert rows["golds"].status == rows["attacks"].status == "pass", list(passport.lines())
    assert rows["sandbox"].status == "pass"
