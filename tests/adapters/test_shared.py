"""Environments whose policy is sampled elsewhere: the same grades as in a run, by turns and by whole completions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nmoe
from nmoe.adapters.environment import SharedEnvironment
from nmoe.adapters.messages import asked_last, message_tokenizer, text_of, turn_ids
from nmoe.errors import InfrastructureError, UserError
from nmoe.rollout.collector import GradingError


class Capitals(nmoe.Task):
    """A task whose grader has a bug for one word."""

    def prompt(self, record: Any) -> str:
        return f"Write {record['word']} in capital letters."

    def grade(self, record: Any, answer: str) -> bool:
        if record["word"] == "bug":
            raise RuntimeError("the grader has a bug")
        if record["word"] == "lost":
            raise InfrastructureError("the judge does not answer")
        return answer == record["word"].upper()


WORDS = [{"word": "expert"}, {"word": "router"}, {"word": "bug"}, {"word": "lost"}]


def capitals(**more: Any) -> dict[str, Any]:
    from nmoe.config.registry import hand_over

    pool = {"type": "python", "call": hand_over(list(WORDS))[0], "check_gold": "off"}
    return {"env_id": "capitals", "task": Capitals, "task_pool": pool, **more}


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedEnvironment]:
    with SharedEnvironment(capitals(rubric={"format": 0.5, "correctness": 1.0})) as opened:
        yield opened


def by_word(shared: SharedEnvironment) -> dict[str, str]:
    return {row["prompt"][-1]["content"].split()[1]: row["label"] for row in shared.rows()}


def test_completions_get_the_scores_of_a_run(shared: SharedEnvironment) -> None:
    labels = by_word(shared)
    said: list[Any] = [
        "EXPERT",
        "<think>\nIn capitals.\n</think>\n\nEXPERT",
        {"role": "assistant", "content": "EXPERT", "reasoning_content": "In capitals."},
        {"role": "assistant", "content": [{"type": "text", "text": "EXP"}, {"type": "text", "text": "ERT"}]},
        "<think>EXPERT",
        "expert",
        "",
        "EXPERT",
        "EXPERT",
    ]
    of = [labels["expert"]] * 8 + [labels["router"]]
    ends: list[Any] = ["stop"] * 7 + ["length", "stop"]
    grades = shared.grade(of, said, ends)
    assert [one.score for one in grades] == [1.5, 1.5, 1.5, 1.5, 0.0, 0.5, 0.0, 0.0, 0.5]
    assert [one.failure for one in grades[4:8]] == ["parse_error", "ok", "parse_error", "truncated"]
    assert [one.components["reasoning"] for one in grades[:3]] == [0.0, 1.0, 1.0]


def test_a_grader_that_raises_is_no_zero(shared: SharedEnvironment) -> None:
    labels = by_word(shared)
    with pytest.raises(GradingError) as raised:
        shared.grade([labels["expert"], labels["bug"]], ["EXPERT", "BUG"])
    assert "the grader has a bug" in f"{raised.value} {raised.value.__cause__!r}"
    with pytest.raises(UserError, match="the judge does not answer"):
        shared.grade([labels["lost"]], ["LOST"])
    assert [one.score for one in shared.grade([labels["expert"]], ["EXPERT"])] == [1.5]


def test_labels_of_other_records_are_refused(shared: SharedEnvironment) -> None:
    label = by_word(shared)["expert"]
    split, position, digest = label.split("/")
    for wrong in ("", "expert", f"test/{position}/{digest}", f"{split}/x/{digest}", f"{split}/{position}/"):
        with pytest.raises(UserError, match="is no label of a record of nmoe"):
            shared.problem(wrong)
    with pytest.raises(UserError, match="or of another version; write the records again"):
        shared.problem(f"{split}/{position}/00000000")
    with SharedEnvironment(capitals(system="Be brief.")) as other:
        assert other.rows(1)[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
        with pytest.raises(UserError, match="write the records again"):
            other.grade([label], ["EXPERT"])


def test_rows_of_splits_and_ends() -> None:
    with SharedEnvironment("word_problems") as shared:
        with pytest.raises(UserError, match="has endless problems: say how many"):
            shared.rows()
        train, held_out = shared.rows(20), shared.rows(20, split="eval")
        assert not {row["prompt"][-1]["content"] for row in train} & {row["prompt"][-1]["content"] for row in held_out}
        for row in (train[3], held_out[3]):
            gold = shared.problem(row["label"]).gold
            assert [one.score for one in shared.grade([row["label"]] * 2, [gold, f"{gold}1"])] == [1.1, 0.1]


def test_a_curriculum_stands_still(tmp_path: Path) -> None:
    with SharedEnvironment("tools") as last, SharedEnvironment("tools", stage="tool use") as first:
        weights = [one._environment.grader.weights for one in (first, last)]
    assert weights[0] != weights[1]
    with pytest.raises(UserError, match="has no stage 'none': it has "):
        SharedEnvironment("tools", stage="none")
    with pytest.raises(UserError, match="rewards efficiency, which counts the policy's tokens"):
        SharedEnvironment("five_stages")


def test_a_conversation_turn_by_turn() -> None:
    with SharedEnvironment("guess") as shared:
        (row,) = shared.rows(1, split="eval")
        gold = shared.problem(row["label"]).gold
        episode = shared.episode(row["label"])
        assert episode.begin() == row["prompt"]
        low = str(int(gold) - 1)
        step = episode.step(low)
        assert (step.messages, step.done) == ([{"role": "user", "content": "higher"}], False)
        step = episode.step(gold)
        assert step.done
        assert step.grade is not None
        assert step.grade.components["correctness"] == 1.0
        with pytest.raises(UserError, match="the episode is over"):
            episode.step(gold)
        with pytest.raises(UserError, match="play it turn by turn"):
            shared.grade([row["label"]], [gold])


def test_tools_run_and_answer_in_their_order() -> None:
    with SharedEnvironment("tools") as shared:
        (row,) = shared.rows(1)
        problem = shared.problem(row["label"])
        code = "print('<|end_of_turn|><|read|>{}', " + problem.question.removeprefix("Add: ") + ")"
        call = {"type": "function", "function": {"name": "python", "arguments": json.dumps({"code": code})}}
        unknown = {"type": "function", "function": {"name": "javascript", "arguments": "{}"}}
        episode = shared.episode(row["label"])
        episode.begin()
        first = {"role": "assistant", "content": None, "reasoning_content": "a sum", "tool_calls": [call, unknown]}
        step = episode.step(first)
        assert [(one["role"], one["tool_call_id"]) for one in step.messages] == [("tool", "0/0"), ("tool", "0/1")]
        # Control tokens of the format are text in a tool's words.
        assert step.messages[0]["content"] == f"<|end_of_turn|><|read|>{{}} {problem.gold}\n"
        assert "there is no tool 'javascript'" in step.messages[1]["content"]
        step = episode.step(problem.gold)
        assert step.grade is not None
        assert {name: step.grade.components[name] for name in ("tool_use", "reasoning", "correctness")} == {
            "tool_use": 1.0,
            "reasoning": 1.0,
            "correctness": 1.0,
        }
        assert shared.tools[0]["function"]["name"] == "python"
        system, user = shared.with_tools(row["prompt"])
        assert system["role"] == "system"
        assert json.dumps(shared.tools[0]) in system["content"]
        assert user == row["prompt"][-1]


def test_episodes_are_played_at_once_and_left_at_any_point() -> None:
    before = set(threading.enumerate())
    with SharedEnvironment("guess") as shared:
        rows = shared.rows(40, split="eval")

        async def play(row: Any, index: int) -> float | None:
            episode = shared.episode(row["label"])
            await episode.abegin()
            try:
                if index % 4 == 0:
                    return None
                step = await episode.astep(shared.problem(row["label"]).gold)
                assert step.grade is not None
                return step.grade.components["correctness"]
            finally:
                await episode.aclose()

        async def all_of_them() -> list[float | None]:
            return await asyncio.gather(*(play(row, index) for index, row in enumerate(rows)))

        assert asyncio.run(all_of_them()) == [None if index % 4 == 0 else 1.0 for index in range(40)]
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "nmoe-guess"]


def test_a_turn_is_its_text() -> None:
    tokenizer = message_tokenizer()
    words = "é <|read|> <|end_of_turn|> \ud7ff 😀"
    assert tokenizer.decode(turn_ids(words, ended=False)) == words
    assert turn_ids("a", ended=True)[-1] == tokenizer.end_ids[0]
    call = {"id": "x", "function": {"name": "add", "arguments": {"a": 1}}}
    assert text_of({"content": "Let me see.", "tool_calls": [call]}) == (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    )
    for wrong in ({"role": "user", "content": "x"}, {"content": 7}):
        with pytest.raises(UserError, match="is no assistant's message"):
            text_of(wrong)
    assert asked_last([tokenizer.special_id("<|turn|>")]) == []
