"""Passports: an environment without fault passes, and each fault is shown with the very answer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from outside_venv import venv
from typer.testing import CliRunner

import nmoe
from nmoe.cli.command import app
from nmoe.config import registry
from nmoe.envs.attacks.texts import Attack, Target, text_attacks, the_same
from nmoe.envs.certify import certify
from nmoe.envs.passport import Passport
from nmoe.types import Grade, Problem


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


def rows_of(passport: Passport) -> dict[str, tuple[str, str]]:
    return {row.name: (row.status, row.said) for row in passport.rows}


def test_an_environment_that_rates_in_its_own_process_is_not_tried(tmp_path: Path) -> None:
    """Without an episode it has given nothing, which is no verdict that an attack failed."""
    path = tmp_path / "environment.toml"
    place = venv(tmp_path, "return 1.0")
    pool = f'[task_pool]\ntype = "verifiers"\nvenv = "{place}"\nenvironment = {{ id = "sums", tasks = 9 }}\n'
    path.write_text(f'env_id = "outside"\nformat = "boxed"\n{pool}')
    passport = certify(path, None, 40)
    whole = "the environment rates whole episodes in its own process, and none was played"
    assert rows_of(passport) == {
        **dict.fromkeys(("golds", "attacks", "repeatable", "prompt", "latency"), ("not tried", whole)),
        "sandbox": ("not tried", "what the other side gives the policy is its own, and was not run"),
        "learnable": ("not tried", "`nmoe rl train` with a tiny model shows it"),
    }
    assert passport.record()["result"] == "not tried"
    run = CliRunner().invoke(app, ["env", "certify", str(path)])
    assert (run.exit_code, run.stdout.count("not tried"), " pass " in run.stdout) == (2, 7, False)


@pytest.mark.parametrize(("task", "status"), [(Doubled, "pass"), (Anywhere, "fail")])
def test_a_program_s_grader_is_tried_and_the_program_is_not(task: type, status: str, tmp_path: Path) -> None:
    [name] = registry.hand_over(task)
    (tmp_path / "records.jsonl").write_text("".join(json.dumps({"number": n}) + "\n" for n in range(100, 132)))
    path = tmp_path / "environment.toml"
    path.write_text(
        f'env_id = "agent"\ntask = "{name}"\n[task_pool]\ntype = "program"\npath = "records.jsonl"\ncommand = ["false"]\n'
    )
    rows = rows_of(certify(path, None, 60))
    assert (rows["golds"][0], rows["attacks"][0], rows["repeatable"][0]) == ("pass", status, "pass")
    assert rows["prompt"] == ("not tried", "the program writes what the policy reads, and was not run")
    assert rows["sandbox"][0] == "not tried"


class Whispering(nmoe.LiveEpisode):
    """Its records have no prompt. The one that it is opened with has the answer."""

    async def open(self, record: nmoe.Record, seed: int) -> str:
        self.answer = self.gold(record)
        return f"Double {record['number']}, which is {self.answer}."

    async def step(self, turn: nmoe.AssistantTurn) -> tuple[None, float, bool]:
        return None, float(turn.answer == self.answer), True

    @classmethod
    def gold(cls, record: nmoe.Record) -> str:
        return str(2 * record["number"])


def test_the_prompt_of_a_live_environment_is_the_one_that_it_asks(tmp_path: Path) -> None:
    [name] = registry.hand_over(Whispering)
    (tmp_path / "records.jsonl").write_text("".join(json.dumps({"number": n}) + "\n" for n in range(100, 132)))
    path = tmp_path / "environment.toml"
    path.write_text(f'env_id = "live"\ntask = "{name}"\n[task_pool]\ntype = "jsonl"\npath = "records.jsonl"\n')
    status, said = rows_of(certify(path, None, 20))["prompt"]
    assert (status, said) == ("fail", "the best position, number 2, is right for 32 of 32")


def test_open_problems_and_rewards_are_not_tried(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(json.dumps({"question": "Write a poem.", "answer": ""}) + "\n")
    opened = '[task_pool]\ntype = "jsonl"\ntask_type = "open"\npath = "records.jsonl"\n'
    rated = '[[rewards]]\ntype = "function"\nname = "short"\ncall = "elsewhere:short"\nweight = 1.0\n'
    path = tmp_path / "environment.toml"
    path.write_text(f'env_id = "poems"\n{opened}{rated}')
    passport = certify(path, None, 20)
    alone = "no answer is right or wrong: [[rewards]] alone rate them"
    assert {name for name, row in rows_of(passport).items() if row == ("not tried", alone)} == {
        "golds", "attacks", "repeatable", "prompt", "latency",
    }  # fmt: skip
    path.write_text(f'env_id = "sort"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\n{rated}')
    status, said = rows_of(certify(path, None, 20))["attacks"]
    assert (status, said.partition("; ")[2]) == ("pass", "[[rewards]] were not asked: short")


def test_tools_that_are_not_loaded_are_not_tried(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def peek(path: str) -> str:\n    """Reads a file."""\n    return path\n')
    path = tmp_path / "environment.toml"
    tools = '[tools]\nuse = ["mine:peek"]\n'
    path.write_text(f'env_id = "sort"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\n{tools}')
    rows = rows_of(certify(path, None, 20))
    assert rows["sandbox"] == ("not tried", "tools of your own are not loaded: mine:peek")


def test_what_the_infrastructure_lost_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> Grade:
        return Grade(0.0, {}, "sandbox_setup_failed", {}, None)

    monkeypatch.setattr("nmoe.envs.playing.Player._grade", lost)
    rows = rows_of(passport_of(tmp_path, Doubled, 20))
    assert {name: rows[name][0] for name in ("golds", "attacks", "repeatable")} == dict.fromkeys(
        ("golds", "attacks", "repeatable"), "not tried"
    )
    assert rows["golds"][1] == "all were lost by the infrastructure: not compared (sandbox_setup_failed)"


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
        ("['-28.0', '93.50']", "['-28.', '93.5']", True),
        ("['-28.0']", "['-280']", False),
        ("1.10.2", "1.1.2", True),
        ("1.01", "1.1", False),
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


# documented: nmoe env certify code_fix
def test_code_is_attacked_in_sandboxes() -> None:
    passport = certify(Path("code_fix"), None, 24)
    rows = {row.name: row for row in passport.rows}
    assert rows["golds"].status == rows["attacks"].status == "pass", list(passport.lines())
    assert rows["sandbox"].status == "pass"
