"""Tasks of one's own: what their state may hold, how their problems are split, and that their golds are graded."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import nmoe
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.registry import hand_over
from nmoe.config.tables.pools import GeneratedPool
from nmoe.envs.check import check_environment
from nmoe.envs.environment import Environment
from nmoe.envs.golds import SAMPLE, check_golds
from nmoe.envs.pools.generated import generated_order, split_of
from nmoe.envs.tasks.adapted import adapted
from nmoe.envs.tasks.conversation import AssistantTurn
from nmoe.envs.tasks.own import EpisodeTask
from nmoe.errors import UserError
from nmoe.text.tokenizer import SMALLEST_VOCABULARY

SAID = AssistantTurn("a", "a")


class Once(nmoe.MultiTurnEnv):
    def __init__(self, size: int = 10) -> None:
        self.size, self.hint = size, "h"

    def prompt(self) -> str:
        return f"Begin {self.rng.randrange(self.size)}."

    def step(self, turn: Any) -> tuple[str, float, bool]:
        had = hasattr(self, "hint")
        if had:
            del self.hint
        return f"{had}", 0.5, False


class SharesAList(Once):
    said: list[str] = []  # noqa: RUF012  the mistake to be told

    def step(self, turn: Any) -> tuple[str, float, bool]:
        self.said.append(turn.text)
        return "again", 0.0, len(self.said) == 3


class HoldsASet(Once):
    def __init__(self) -> None:
        self.words = {"a"}


class CannotBegin(Once):
    def __init__(self) -> None:
        raise FileNotFoundError("words.txt")


class Told(nmoe.Task):
    """The question is always the same; the message before it differs."""

    right = True

    def generate(self, rng: random.Random, difficulty: int) -> dict[str, int]:
        return {"number": rng.randrange(10_000)}

    def prompt(self, record: Mapping[str, Any]) -> Any:
        system = {"role": "system", "content": f"The number is {record['number']}."}
        return [system, {"role": "user", "content": "Which number?"}]

    def gold(self, record: Mapping[str, Any]) -> str:
        return str(record["number"])

    def grade(self, record: Mapping[str, Any], answer: str) -> bool:
        return (answer == str(record["number"])) is self.right


def pool(part: Any, **settings: Any) -> GeneratedPool:
    return GeneratedPool(type="generated", task_type=hand_over(part)[0], **settings)


def test_an_attribute_that_a_step_deletes_stays_deleted() -> None:
    order = generated_order("once", pool(Once))
    task, problem = adapted(Once, "once"), order.at(0)
    assert isinstance(task, EpisodeTask)
    first = task.exchange(problem, None, SAID, turn=0, seed=0)
    second = task.exchange(problem, first, SAID, turn=1, seed=0)
    assert (first.user, second.user) == ("True", "False")


def test_a_list_that_all_episodes_would_share_is_refused() -> None:
    task, problem = adapted(SharesAList, "shares"), generated_order("shares", pool(SharesAList)).at(0)
    assert isinstance(task, EpisodeTask)
    with pytest.raises(UserError, match=r"the class's own `said` has changed.*set `self.said` in prompt\(\)"):
        task.exchange(problem, None, SAID, turn=0, seed=0)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (HoldsASet, r"its attributes: state.words is not JSON: {'a'}; .* or a name that begins with _"),
        (
            CannotBegin,
            r"CannotBegin\(\), which is called without arguments, raised FileNotFoundError: words.txt, at .*py:\d+",
        ),
    ],
)
def test_an_episode_that_cannot_begin_says_why(part: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        adapted(part, "mine")


def test_what_the_question_does_not_show_decides_the_split() -> None:
    orders = {split: generated_order("told", pool(Told(), split=split)) for split in ("train", "validation", "eval")}
    seen = {split: {order.at(place).metadata["messages"] for place in range(40)} for split, order in orders.items()}
    assert all(len(messages) > 30 for messages in seen.values())
    assert not seen["train"] & seen["eval"]
    assert not seen["train"] & seen["validation"]
    problem = orders["eval"].at(0)
    assert split_of(problem.task_type, problem.question, problem.metadata) == "eval"


def test_an_order_of_another_instance_is_another_order() -> None:
    (ten, again, hundred) = (generated_order("once", pool(Once(size))).fingerprint for size in (10, 10, 100))
    assert ten == again != hundred


def test_golds_that_a_task_generates_are_graded_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMOE_GOLDS", str(tmp_path))
    task = Told()
    settings = EnvironmentSettings(env_id="told", format="boxed", task_pool=pool(task))
    environment = Environment.from_settings(settings, nmoe.Tokenizer.train((), SMALLEST_VOCABULARY))
    check_golds(environment, None, print)
    task.right = False  # as if its code had changed since
    with pytest.raises(
        UserError, match=rf"{SAMPLE} of {SAMPLE} gold answers .* correct the task's `gold` or `grade`:\ntold/0: "
    ):
        check_golds(environment, None, print)


def test_a_check_of_an_environment_has_the_episode_respond(tmp_path: Path) -> None:
    file = tmp_path / "once.toml"
    file.write_text(f'env_id = "once"\nformat = "boxed"\ntask = "{hand_over(Once)[0]}"\n')
    lines = list(check_environment(file, None))
    assert "problem once/0: no right answer to it is known, so that none was graded" in lines
    assert any(
        line.startswith("  after the wrong answer the user says 'True', in the state {'size': 10}") for line in lines
    )
