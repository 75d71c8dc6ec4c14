"""Trajectories with tools as rewards read them: the message lists of chat APIs, in both formats that have messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chat_templates import qwen
from rollout.test_chat_episode import CALL, SETTINGS
from rollout.test_chat_episode import play as play_chat
from rollout.test_chat_episode import turns as chat_turns
from rollout.test_episode import POOL, TOOLS, call, final, in_turn, play

from nmoe.envs.environment import Environment
from nmoe.envs.rewards.conversation import completion_of, samples_of
from nmoe.text.harmony import Harmony
from nmoe.types import TrainerState

Make = Callable[..., Environment]


def called(name: str, arguments: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_harmony_calls_and_answers_stand_in_their_order(environment: Make, harmony: Harmony) -> None:
    demo = environment(POOL + TOOLS)
    script = in_turn(call(harmony, "add", '{"x": 40, "y": 2}', "First."), call(harmony, "nope", "{}"), final(harmony))
    (trajectory,), _ = play(demo, script)
    unknown = trajectory.tool_events[1].output
    assert completion_of(demo, trajectory) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "First.",
            "tool_calls": [called("add", '{"x": 40, "y": 2}')],
        },
        {"role": "tool", "name": "add", "content": "42"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [called("nope", "{}")]},
        {"role": "tool", "name": "nope", "content": unknown},
        {"role": "assistant", "content": "123"},
    ]
    assert "unknown_tool" in unknown
    assert samples_of(demo, [trajectory], TrainerState()).answers == ["123"]


def test_chat_calls_and_answers_likewise(tmp_path: Path) -> None:
    tokenizer = qwen(tmp_path)
    (tmp_path / "environment.toml").write_text(SETTINGS)
    demo = Environment.from_toml(tmp_path / "environment.toml", tokenizer)
    first = f"<think>\nhm\n</think>\n\nLet me add.\n{CALL}"
    trajectory, _ = play_chat(demo, chat_turns(tokenizer, first, "<think>\nso\n</think>\n\n123"))
    one, two, three = completion_of(demo, trajectory)
    assert isinstance(one, dict)
    assert (one["content"].strip(), one["reasoning_content"].strip()) == ("Let me add.", "hm")
    assert one["tool_calls"] == [called("add", '{"x": 40, "y": 2}')]
    assert two == {"role": "tool", "name": "add", "content": "42"}
    assert isinstance(three, dict)
    assert (three["content"], three["reasoning_content"].strip()) == ("123", "so")


@pytest.mark.parametrize("text", ["", "hm", "<|start|>"])
def test_broken_harmony_has_no_content(environment: Make, harmony: Harmony, text: str) -> None:
    demo = environment(POOL)
    (trajectory,), _ = play(demo, lambda *_: [*harmony.tokenizer.encode(text), harmony.stop_ids[0]])
    assert trajectory.grade.failure == "parse_error"
    assert completion_of(demo, trajectory) == [{"role": "assistant", "content": ""}]
