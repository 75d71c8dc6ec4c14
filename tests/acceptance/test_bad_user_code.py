"""Mistakes in a user's own task, reward, environment or registration: each command ends with one message and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import Result

from nmoe.config.registry import REWARDS

MODULE = """
import nmoe

class NoPrompt(nmoe.Task):
    def grade(self, record, answer):
        return True
    def generate(self, rng, difficulty):
        return {"text": str(rng.random())}

class Once(nmoe.MultiTurnEnv):
    def prompt(self):
        return "Which?"  # of the split "eval"
    def step(self, turn):
        return None, 1.0, True

class Nonsense(nmoe.MultiTurnEnv):
    def prompt(self):
        return f"Reverse: {self.rng.randrange(100)}"
    def step(self, turn):
        return 3

class NoStep(nmoe.MultiTurnEnv):
    def prompt(self):
        return "hi"

def short(completions, **columns):
    return [1.0]

def words(completions, **columns):
    return ["much" for one in completions]

def positional(completions, /):
    return [1.0 for one in completions]
"""
TWICE = """
import nmoe

@nmoe.reward(name="length")
def first(completions, **columns):
    return [1.0 for one in completions]

@nmoe.reward(name="length")
def second(completions, **columns):
    return [2.0 for one in completions]
"""
RUN = """
[run]
steps = 1
threads = 1
[model]
path = "BASE"
[environment]
env_id = "mine"
format = "harmony"
task = "TASK"
[sampling]
max_new_tokens = 24
[batch]
prompts_per_step = 2
group_size = 2
"""
REWARD = '[[environment.rewards]]\ntype = "function"\nname = "own"\ncall = "CALL"\n'


@pytest.fixture(autouse=True)
def modules_are_forgotten() -> Iterator[None]:
    yield
    for name in ("bad_parts", "registers_twice"):
        sys.modules.pop(name, None)
    REWARDS._registered.pop("length", None)


@pytest.mark.parametrize(
    ("task", "call", "said"),
    [
        ("bad_parts:NoPrompt", "", "NoPrompt has no prompt: define `prompt(self, record)`"),
        (
            "bad_parts:Once",
            "",
            "all of them ask 'Which?': draw them by their rng, or write [task_pool] split = \"all\"",
        ),
        ("bad_parts:Nonsense", "", "step returned 3, not (messages, reward, done)"),
        ("bad_parts:NoStep", "", "task bad_parts:NoStep: has no method `step`"),
        ("reverse", "bad_parts:short", "returned 1 values for 2 completions, [1.0]; it has to return one for each"),
        ("reverse", "bad_parts:words", "returned 'much', a str, as value 1 of 2; a reward is a number"),
        ("reverse", "bad_parts:positional", "by position alone"),
        ("reverse", "registers_twice:first", "reward 'length' is registered twice: by registers_twice:first and by "),
    ],
)
def test_one_message_says_what_is_wrong_with_the_users_code(
    nmoe: Callable[..., Result], base: Path, tmp_path: Path, task: str, call: str, said: str
) -> None:
    (tmp_path / "bad_parts.py").write_text(MODULE)
    (tmp_path / "registers_twice.py").write_text(TWICE)
    text = RUN.replace("BASE", str(base)).replace("TASK", task)
    (tmp_path / "run.toml").write_text(text + (REWARD.replace("CALL", call) if call else ""))
    result = nmoe("rl", "train", "run.toml")
    assert result.code == 2
    message = result.err[result.err.index("error: ") :]
    assert said in message
    assert message.count("\n") == 1
    assert "Traceback" not in result.err
