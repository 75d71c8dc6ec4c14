"""Environments of nmoe as environments of SkyRL-Gym, made and played as SkyRL's generator does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe.adapters.environment import shared_by_name
from nmoe.adapters.records import write_records
from nmoe.errors import UserError

gym = pytest.importorskip("skyrl_gym")


@pytest.fixture(autouse=True)
def registered() -> Any:
    gym.register(id="nmoe", entry_point="nmoe.adapters.skyrl_gym:NmoeEnv")
    yield
    gym.envs.registration.deregister("nmoe")


def made(row: dict[str, Any], max_turns: int) -> tuple[Any, list[dict[str, str]]]:
    """An environment as `SkyRLGymGenerator.agent_loop` makes it of a row of its `PromptDataset`."""
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    extras["max_turns"] = max_turns
    env = gym.make(row["env_class"], env_config={}, extras=extras)
    prompt, info = env.init(row["prompt"])
    assert info == {}
    return env, prompt


def written(directory: Path, environment: str, count: int, split: Any = "train") -> list[dict[str, Any]]:
    out = directory / "records.jsonl"
    assert write_records(environment, out, count, split) == count
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_one_turn(tmp_path: Path) -> None:
    rows = written(tmp_path, "word_problems", 3)
    gold = shared_by_name("word_problems").problem(rows[1]["label"]).gold
    for said, reward in ((gold, 1.1), ("many", 0.1)):
        env, prompt = made(rows[1], max_turns=1)
        assert prompt == rows[1]["prompt"]
        output = env.step(said)
        assert (output["observations"], output["reward"], output["done"]) == ([], reward, True)
        assert output["metadata"]["correctness"] == float(reward > 1)
        graded = {"format": 1, "structure": 1, "reasoning": 0, "correctness": float(reward > 1)}
        assert env.get_metrics() == {"turns": 1, **graded}
        assert output["metadata"] == {"failure": "ok", **graded}
        env.close()
    # The package averages them over episodes.
    averaged = type(env).aggregate_metrics([{"turns": 1, "correctness": 1.0}, {"turns": 3, "correctness": 0.0}])
    assert averaged["turns"] == 2


def test_plain_text(tmp_path: Path) -> None:
    (row,) = written(tmp_path, "sums", 1)
    env, prompt = made(row, max_turns=1)
    assert prompt == row["prompt"]
    output = env.step(f"\\boxed{{{shared_by_name('sums').problem(row['label']).gold}}}")
    assert (output["metadata"]["correctness"], output["done"]) == (1.0, True)
    env.close()


def test_reasoning_that_the_prompt_opened(tmp_path: Path) -> None:
    (row,) = written(tmp_path, "word_problems", 1)
    gold = shared_by_name("word_problems").problem(row["label"]).gold
    env, _ = made(row, max_turns=1)
    with pytest.raises(UserError, match="say by `opens_reasoning`"):
        env.step(f"so</think>{gold}")
    env.close()
    gym.envs.registration.deregister("nmoe")
    kwargs = {"opens_reasoning": True, "environment": "word_problems"}
    gym.register(id="nmoe", entry_point="nmoe.adapters.skyrl_gym:NmoeEnv", kwargs=kwargs)
    # The entry point's environment counts before the one of a record.
    env, _ = made({**row, "environment": "of_another_machine"}, max_turns=1)
    assert env.step(f"so</think>{gold}")["reward"] == 1.1
    env.close()


def test_turns_of_the_user(tmp_path: Path) -> None:
    (row,) = written(tmp_path, "guess", 1, "eval")
    shared = shared_by_name("guess")
    gold = shared.problem(row["label"]).gold
    env, _ = made(row, max_turns=shared.turns)
    output = env.step(str(int(gold) - 1))
    assert (output["observations"], output["reward"], output["done"]) == (
        [{"role": "user", "content": "higher"}],
        0.0,
        False,
    )
    output = env.step(gold)
    assert output["done"]
    assert output["reward"] == pytest.approx(1.4)
    env.close()
    env.close()
    with pytest.raises(UserError, match=r"generator\.max_turns is 1, and an episode of guess has up to"):
        made(row, max_turns=1)


def test_tools(tmp_path: Path) -> None:
    (row,) = written(tmp_path, "tools", 1)
    assert row["prompt"][0]["role"] == "system"
    assert '"name": "python"' in row["prompt"][0]["content"]
    shared = shared_by_name("tools")
    problem = shared.problem(row["label"])
    env, _ = made(row, max_turns=shared.turns)
    code = f"print({problem.question.removeprefix('Add: ')})"
    output = env.step(f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>")
    assert output["observations"] == [
        {"role": "user", "content": f"<tool_response>\n{problem.gold}\n\n</tool_response>"}
    ]
    output = env.step(problem.gold)
    assert output["done"]
    assert output["metadata"] | {"failure": "ok", "tool_use": 1.0, "correctness": 1.0} == output["metadata"]
    env.close()


def test_what_cannot_be_played_is_said(tmp_path: Path) -> None:
    (row,) = written(tmp_path, "word_problems", 1)
    for wrong in ({"reward_spec": {}}, {"environment": 3}):
        with pytest.raises(UserError, match="write records by `nmoe env records"):
            made({**row, **wrong}, max_turns=1)


def test_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gym.envs.registration.deregister("nmoe")
    page = (Path(__file__).parents[2] / "docs" / "ecosystem.md").read_text().partition("### SkyRL")[2]
    (row,) = written(tmp_path, "word_problems", 1)
    (tmp_path / "records.jsonl").rename(tmp_path / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    right = shared_by_name("word_problems").problem(row["label"]).gold == "5"
    assert capsys.readouterr().out.startswith(f"{1.1 if right else 0.1} True {{'turns': 1, 'format': 1.0")
