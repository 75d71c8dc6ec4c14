"""Environments whose policy is sampled elsewhere: the same grades as in a run, by turns and by whole completions."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nmoe
from nmoe.adapters.environment import SharedEnvironment
from nmoe.adapters.messages import asked_last, message_tokenizer, text_of, turn_ids
from nmoe.errors import InfrastructureError, UserError
from nmoe.rollout.collector import GradingError
from nmoe.types import TrainerState


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


def test_nothing_is_kept_of_what_was_graded(shared: SharedEnvironment) -> None:
    """A trainer grades for days, and has its own account of tokens."""
    label = by_word(shared)["router"]
    shared.grade([label, label], ["ROUTER", "router"])
    with contextlib.closing(shared.episode(label)) as episode:
        episode.begin()
        assert episode.step("ROUTER").done
    assert shared._collector.sampled_tokens == {}


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
    positions = ("x", "²", "9" * 5000)
    for wrong in (
        "",
        "expert",
        f"test/{position}/{digest}",
        f"{split}/{position}/",
        *(f"{split}/{x}/1f" for x in positions),
    ):
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


def test_reasoning_that_the_prompt_opened(shared: SharedEnvironment) -> None:
    """Templates of reasoning models end the prompt in <think>, so that a completion only closes it."""
    label = by_word(shared)["expert"]

    def scores(said: list[Any], opens: bool) -> list[tuple[float, float]]:
        grades = shared.grade([label] * len(said), said, opens_reasoning=opens)
        return [(one.score, one.components["reasoning"]) for one in grades]

    apart = {"role": "assistant", "content": "EXPERT", "reasoning_content": "In capitals."}
    said = ["In capitals.\n</think>\n\nEXPERT", "EXPERT", apart, {"content": "so</think>EXPERT"}]
    assert scores(said, opens=True) == [(1.5, 1.0), (0.0, 0.0), (1.5, 1.0), (1.5, 1.0)]
    # Without the prompt's tag the first is out of form, as in a run with such a template.
    assert scores(said[:3], opens=False) == [(0.0, 0.0), (1.5, 0.0), (1.5, 1.0)]
    with pytest.raises(UserError, match="closes reasoning that it has not opened: say by `opens_reasoning`"):
        shared.grade([label], ["so</think>EXPERT"])
    # A tag in a call is an argument.
    assert shared.grade([label], ["<tool_call>{'</think>'}</tool_call>"])[0].score == 0.0
    episode = shared.episode(label, opens_reasoning=True)
    episode.begin()
    grade = episode.step("so</think>EXPERT").grade
    assert grade is not None
    assert grade.score == 1.5
    other = shared.episode(label)
    other.begin()
    with pytest.raises(UserError, match="say by `opens_reasoning`"):
        other.step("so</think>EXPERT")
    assert other.step("EXPERT").done


def rewarded(function: Any, **more: Any) -> dict[str, Any]:
    from nmoe.config.registry import hand_over

    own = {"type": "function", "name": "own", "call": hand_over(function)[0], "weight": 1.0, **more}
    return capitals(rewards=[own], rubric={"correctness": 0.0, "format": 0.0})


def test_rewards_read_the_tokens_and_the_step_of_the_trainer() -> None:
    def own(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        return [len(ids) + trainer_state.global_step / trainer_state.max_steps for ids in completion_ids]

    with SharedEnvironment(rewarded(own)) as shared:
        labels = by_word(shared)
        of = [labels["expert"], labels["router"], labels["expert"]]
        ids, state = [[7, 8, 2], [2], [9, 2]], TrainerState(5, 10)
        grades = shared.grade(of, ["ééé", "b", "c"], completion_ids=ids, state=state)
        assert [one.score for one in grades] == [3.5, 1.5, 2.5]
        with pytest.raises(UserError, match="takes completion_ids, and here the trainer gives none"):
            shared.grade(of, ["a", "b", "c"], state=state)
        with pytest.raises(UserError, match="their tokens do not belong together"):
            shared.grade(of, ["a", "b", "c"], completion_ids=ids[:2], state=state)
        with pytest.raises(
            UserError, match="takes completion_ids and trainer_state, which this trainer does not hand over"
        ):
            shared.episode(labels["expert"])

    def any_of_them(completions: Any, **columns: Any) -> list[float]:
        return [float("completion_ids" in columns) + 2 * float("trainer_state" in columns)] * len(completions)

    with SharedEnvironment(rewarded(any_of_them)) as shared:
        label = by_word(shared)["expert"]
        assert [one.score for one in shared.alone().grade([label], ["a"])] == [0.0]
        assert [one.score for one in shared.grade([label], ["a"], completion_ids=[[1]], state=state)] == [3.0]


def test_rewards_that_compare_get_whole_groups() -> None:
    def own(completions: Any, **_: Any) -> list[float]:
        lengths = [len(one[-1]["content"]) for one in completions]
        return [float(sum(length < other for other in lengths)) for length in lengths]

    with SharedEnvironment(rewarded(own, replay=False)) as shared:
        labels = by_word(shared)
        # Two groups of one problem, as of a data set that is smaller than a batch.
        of = [labels["expert"]] * 4 + [labels["router"]] * 2
        said = ["a", "bbb", "cc", "ddddd", "e", "ff"]
        assert [one.score for one in shared.grade(of, said, samples=2)] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
        with pytest.raises(UserError, match="compares the samples of a group: say how many"):
            shared.grade(of, said)
        with pytest.raises(UserError, match="completions 4 to 7 of 6 are not 4 of one problem"):
            shared.grade(of, said, samples=4)
        with pytest.raises(UserError, match="completions 3 to 5 of 6 are not 3 of one problem"):
            shared.grade(of, said, samples=3)
        with pytest.raises(UserError, match="this trainer hands over one completion at a time"):
            shared.episode(labels["expert"])


@pytest.mark.parametrize("kind", ["reward_model", "verifier"])
def test_rewards_by_models_are_refused(kind: str) -> None:
    table = capitals(rewards=[{"type": kind, "name": "own", "path": "runs/none", "weight": 1.0}])
    with pytest.raises(UserError, match=f"the reward 'own' is of type '{kind}', whose model only a run of nmoe loads"):
        SharedEnvironment(table)


def test_an_environment_of_plain_text() -> None:
    with SharedEnvironment("sums") as shared:
        (row,) = shared.rows(1)
        gold = shared.problem(row["label"]).gold
        episode = shared.episode(row["label"])
        assert episode.begin() == row["prompt"]
        # All that the policy says is its answer, tags too.
        grade = episode.step(f"so</think> \\boxed{{{gold}}}").grade
        assert grade is not None
        assert grade.components["correctness"] == 1.0
    with pytest.raises(UserError, match="answers the policy in plain text"):
        SharedEnvironment({"env_id": "guess", "task": "guess", "format": "boxed"})


def test_another_record_is_another_label() -> None:
    from nmoe.config.registry import hand_over

    def labels(tests: str) -> set[str]:
        table = capitals()
        pool = {"type": "python", "call": hand_over([{"word": "a", "tests": tests}])[0], "check_gold": "off"}
        with SharedEnvironment(table | {"task_pool": pool}) as shared:
            return {row["label"] for row in shared.rows()}

    assert labels("one") == labels("one")
    assert labels("one") != labels("two")


class Echo(nmoe.LiveEpisode):
    """Tells the seed that it was opened with, and ends with the second turn."""

    async def open(self, record: Any, seed: int) -> str:
        self.turns = 0
        return f"{record['word']} {seed}"

    async def step(self, turn: Any) -> Any:
        self.turns += 1
        return ("go on", 0.0, False) if self.turns == 1 else (None, 0.25, True)


def test_a_live_environment() -> None:
    with SharedEnvironment(capitals() | {"task": Echo}) as shared:
        assert shared.asks_itself
        label = shared.rows()[0]["label"]
        asked = []
        for _ in range(2):
            episode = shared.episode(label)
            asked.append(episode.begin())
            assert episode.step("a").messages == [{"role": "user", "content": "go on"}]
            grade = episode.step("b").grade
            assert grade is not None
            assert grade.components["correctness"] == 0.25
        # The samples of a group answer one question.
        assert asked[0] == asked[1]


class Dice(nmoe.MultiTurnEnv):
    """Answers with a number that it draws."""

    def prompt(self) -> str:
        return self.record["word"]

    def step(self, turn: Any) -> Any:
        return str(self.rng.random()), 0.0, False


def test_samples_of_a_record_are_not_answered_alike() -> None:
    def answers() -> list[str]:
        with SharedEnvironment(capitals() | {"task": Dice}) as shared:
            label = shared.rows()[0]["label"]
            said = []
            for _ in range(3):
                episode = shared.episode(label)
                episode.begin()
                said.append(episode.step("a").messages[0]["content"])
            return said

    first = answers()
    assert len(set(first)) == 3
    assert answers() == first


def test_an_episode_that_nobody_holds_ends() -> None:
    with SharedEnvironment("guess") as shared:
        (row,) = shared.rows(1, split="eval")
        episode = shared.episode(row["label"])
        episode.begin()
        playing = weakref.ref(episode._playing)
        del episode
        until = time.monotonic() + 10
        while (task := playing()) is not None and not task.done() and time.monotonic() < until:
            del task
            gc.collect()
            time.sleep(0.01)
        assert playing() is None or playing().cancelled()  # type: ignore[union-attr]


def test_who_waits_while_an_environment_closes_is_told() -> None:
    shared = SharedEnvironment("tools")
    (row,) = shared.rows(1)
    call = {"function": {"name": "python", "arguments": json.dumps({"code": "import time; time.sleep(60)"})}}
    episode, other = shared.episode(row["label"]), shared.episode(row["label"])
    episode.begin()
    other.begin()
    said: list[str] = []

    def step() -> None:
        try:
            episode.step({"role": "assistant", "content": "", "tool_calls": [call]})
        except UserError as error:
            said.append(str(error))

    waiting = threading.Thread(target=step)
    waiting.start()
    time.sleep(0.3)
    shared.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert said == ["the environment 'tools' was closed, so that nothing in it can be played or graded"]
    for late in (lambda: other.step("1"), lambda: shared.episode(row["label"]).begin()):
        with pytest.raises(UserError, match="the environment 'tools' was closed"):
            late()
    other.close()


def test_an_environment_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())

    async def fails(self: Any) -> Any:
        raise UserError("the judge cannot be opened")

    monkeypatch.setattr(SharedEnvironment, "_opened", fails)
    closed: list[bool] = []
    from nmoe.envs.tools.runtime import ToolRuntime

    monkeypatch.setattr(ToolRuntime, "close", lambda self: closed.append(True))
    with pytest.raises(UserError, match="the judge cannot be opened"):
        SharedEnvironment("guess")
    assert closed == [True]
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "nmoe-guess"]
