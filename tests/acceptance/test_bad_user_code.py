"""Bad user code and bad preference pairs: one message, and exit code 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Result

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


Nmoe = Callable[..., Result]

CONFIG = """
[run]
steps = 1
threads = 1
[model]
path = "BASE"
[records]
path = "pairs.jsonl"
"""
GOOD = {"prompt": "Reverse: 12", "chosen": "21", "rejected": "12"}


@pytest.fixture
def config(base: Path, tmp_path: Path) -> Callable[..., str]:
    """Writes pairs.jsonl and the configuration of a run on it, whose name is returned."""

    def config(*records: object, text: str = "") -> str:
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / "x.toml").write_text(CONFIG.replace("BASE", str(base)) + text)
        return "x.toml"

    return config


@pytest.mark.parametrize("verb", ["dpo", "reward"])
@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [GOOD, GOOD | {"chosen": "12"}],
            "pairs.jsonl:2: 'chosen' and 'rejected' are equal, so neither is preferred",
        ),
        ([GOOD | {"rejected": ""}], "pairs.jsonl:1: 'rejected' is empty; fill it in or remove the record"),
        (
            [GOOD, {"prompt": "Reverse: 12", "chosen": "21"}],
            "pairs.jsonl:2: a record of kind preference has 'rejected'",
        ),
        (
            [{"question": "Reverse: 12", "answer": "21"}],
            "pairs.jsonl:1: the columns 'question', 'answer' fit no format",
        ),
        (
            [{"prompt": "Reverse: 12", "completion": "21"}],
            "pairs.jsonl:1: the columns 'prompt', 'completion' fit no format",
        ),
        ([GOOD | {"prompt": "1 2 " * 99}], "pairs.jsonl: no pair is left to train on; left out: 1 pairs longer than"),
        ([], "pairs.jsonl: no records"),
    ],
)
def test_pairs_that_are_none(
    verb: str, records: list[object], message: str, config: Callable[..., str], nmoe: Nmoe, tmp_path: Path
) -> None:
    result = nmoe(verb, config(*records))
    assert result.code == 2
    assert [line.partition(":")[0] for line in result.out.splitlines()] == ["memory"], "printed before data is read"
    assert result.err.startswith(f"error: {message}"), result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_overlong_pairs_are_left_out_and_said(config: Callable[..., str], nmoe: Nmoe, tmp_path: Path) -> None:
    long = GOOD | {"rejected": "1 2 " * 99}
    result = nmoe("dpo", config(long, GOOD, long))
    assert (result.code, result.err) == (0, "")
    line = "left out: 2 pairs longer than the model's context of 64 tokens, the first at pairs.jsonl:1\n"
    assert line in result.out
    assert line in (tmp_path / "runs" / "x" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "messages"\n', 'must be "preference" or left out'),
        ("held_out = 0.5\n", "records are held out but never evaluated on"),
        ('[preference]\nloss = "hinge"\nlabel_smoothing = 0.1\n', 'loss = "hinge" has none; sigmoid, sigmoid_norm and'),
        ("[preference]\nbeta = 0\n", "x.toml:10: [preference] beta = 0: must be more than 0"),
        ("[reward_model]\nmargin = 1\n", "[reward_model]: unknown key"),
    ],
)
def test_settings_that_do_not_go_together(text: str, message: str, config: Callable[..., str], nmoe: Nmoe) -> None:
    result = nmoe("dpo", config(GOOD, text=text))
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_scorer_that_is_none(base: Path, workshop: Path, nmoe: Nmoe) -> None:
    several = ["--samples", "2", "--temperature", "1", "--problems", "2"]
    result = nmoe("eval", base, workshop / "reverse.toml", *several, "--best-of", base)
    assert result.code == 2
    assert "this checkpoint has no head, and one of kind 'reward' is wanted" in result.err
    result = nmoe("eval", base, workshop / "reverse.toml", "--best-of", base)
    assert "--best-of chooses among several samples of a problem; ask for them with --samples N" in result.err


def test_pairs_from_samples(base: Path, workshop: Path, nmoe: Nmoe, config: Callable[..., str], tmp_path: Path) -> None:
    """What the base samples becomes pairs that both recipes read, and a reward model chooses among samples."""
    options = ["--problems", "40", "--samples", "6"]
    result = nmoe("data", "pairs", base, workshop / "reverse.toml", "sampled.jsonl", *options)
    assert (result.code, result.err) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "sampled.jsonl").read_text().splitlines()]
    assert result.out == f"sampled.jsonl: {len(rows)} pairs from 40 problems of 6 samples each\n"
    assert len(rows) > 10
    for row in rows:
        (question,) = row["prompt"]
        digits = question["content"].removeprefix("Reverse: ")
        assert row["chosen"][-1] == {"role": "assistant", "content": digits[::-1], "channel": "final"}
        assert row["rejected"][-1]["channel"] == "final"
        assert row["rejected"][-1]["content"] != digits[::-1]
    again = nmoe("data", "pairs", base, workshop / "reverse.toml", "again.jsonl", *options)
    assert again.code == 0
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "sampled.jsonl").read_bytes()

    result = nmoe("reward", config(GOOD), "--records.path=sampled.jsonl", "--run.name=reward")
    assert (result.code, result.err) == (0, "")
    several = ["--samples", "4", "--temperature", "1", "--problems", "8", "--best-of", "runs/reward"]
    result = nmoe("eval", base, workshop / "reverse.toml", *several)
    assert (result.code, result.err) == (0, "")
    modes = [line.split(" on ")[0] for line in result.out.splitlines()[1:]]
    assert modes == [
        "greedy_pass@1",
        "sampling_pass@1",
        "pass@2",
        "pass@3",
        "pass@4",
        "sampling_pass@4",
        "best_of@4",
        "best_of@4 - sampling_pass@4",
    ]

    result = nmoe(
        "data",
        "pairs",
        base,
        workshop / "reverse.toml",
        "none.jsonl",
        "--problems",
        "3",
        "--samples",
        "2",
        "--seed",
        "1",
        "--temperature",
        "0.001",
    )
    assert result.code == 2
    assert "none of 3 problems has both a right and a wrong sample in good form" in result.err
    assert not (tmp_path / "none.jsonl").exists()
