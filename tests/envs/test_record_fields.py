"""Records as OpenRLHF, SkyRL and verl have them become problems as they are; conversations stay conversations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout.test_replay import trajectory_of

from nmoe.envs.environment import Environment
from nmoe.envs.pools import Pool
from nmoe.errors import UserError
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import Check, replay
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

MakePool = Callable[..., Pool]
Make = Callable[..., Environment]

ASKED = [{"role": "user", "content": "What is 6 * 7?"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 6 * 7?"},
]


def write(path: Path, records: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
@pytest.mark.parametrize(
    ("record", "read_as"),
    [
        ({"input": "What is 6 * 7?", "label": "42"}, "question from 'input', gold from 'label'"),
        (
            {
                "data_source": "openai/gsm8k",
                "prompt": ASKED,
                "env_class": "gsm8k",
                "reward_spec": {"method": "rule", "ground_truth": "42"},
                "extra_info": {"answer": "6 * 7 = 42", "question": "What is 6 * 7?", "split": "train"},
            },
            "question from 'prompt', gold from 'reward_spec.ground_truth'",
        ),
        (
            {"prompt": "What is 6 * 7?", "ability": "math", "reward_model": {"style": "rule", "ground_truth": "42"}},
            "question from 'prompt', gold from 'reward_model.ground_truth'",
        ),
        ({"prompt": json.dumps(ASKED), "label": "42"}, "question from 'prompt', gold from 'label'"),
        ({"prompt": ASKED, "label": "42"}, "question from 'prompt', gold from 'label'"),
        ({"question": "What is 6 * 7?", "answer": "42"}, "question from 'question', gold from 'answer'"),
        ({"problem": "What is 6 * 7?", "answer": "42", "solution": "?"}, "question from 'problem', gold from 'answer'"),
    ],
)
def test_records_are_read_as_they_are(
    make_pool: MakePool, tmp_path: Path, kind: str, record: dict[str, Any], read_as: str
) -> None:
    suffix = "parquet" if kind == "parquet" else "jsonl"
    path = write(tmp_path / f"data.{suffix}", [record, record])
    pool = make_pool({"type": kind, "dataset" if kind == "hf" else "path": path, "task_type": "math"})
    (problem,) = pool.take(1)
    assert (problem.question, problem.gold, problem.history) == ("What is 6 * 7?", "42", ())
    assert pool.order.read_as.endswith(f": {read_as}")


@pytest.mark.parametrize(
    ("label", "gold"), [(42, "42"), (-3, "-3"), (42.5, "42.5"), (1e-07, "0.0000001"), (1e21, "1000000000000000000000")]
)
@pytest.mark.parametrize("task_type", ["math", "gsm8k"])
def test_labels_that_are_numbers_are_taken_as_they_are(
    make_pool: MakePool, tmp_path: Path, task_type: str, label: float, gold: str
) -> None:
    path = write(tmp_path / "data.jsonl", [{"input": "What is 6 * 7?", "label": label}])
    assert make_pool({"type": "jsonl", "path": path, "task_type": task_type}).take(1)[0].gold == gold


@pytest.mark.parametrize(("task_type", "label"), [("sort", 135), ("math", True), ("gsm8k", float("nan"))])
def test_numbers_that_are_no_answers_are_refused(
    make_pool: MakePool, tmp_path: Path, task_type: str, label: object
) -> None:
    # The digits 0135 of a sorting problem would be read as the number 135.
    path = write(tmp_path / "data.jsonl", [{"input": "Sort: 3150", "label": label}])
    with pytest.raises(UserError, match=rf"field 'label' holds the (number|boolean) {label}, not text"):
        make_pool({"type": "jsonl", "path": path, "task_type": task_type})


def test_a_conversation_reaches_the_prompt_turn_by_turn(
    environment: Make, harmony: Harmony, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write(tmp_path / "data.parquet", [{"prompt": CHAT, "reward_spec": {"method": "rule", "ground_truth": "42"}}])
    demo = environment('[task_pool]\ntype = "parquet"\npath = "data.parquet"\ntask_type = "math"\n')
    (problem,) = demo.pool.take(1)
    assert problem.question == "And 6 * 7?"
    messages = [
        Message("system", "Be brief."),
        Message("user", "What is 1 + 1?"),
        Message("assistant", "It is 2.", channel="final"),
        Message("user", "And 6 * 7?"),
    ]
    assert demo.prompts.messages(problem) == messages
    assert demo.prompts.ids(problem) == harmony.render_prompt(messages)
    text = tokenizer.decode(demo.prompts.ids(problem))
    assert "<|start|>assistant<|channel|>final<|message|>It is 2.<|end|>" in text


def test_a_conversation_is_replayed(environment: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [{"prompt": CHAT, "label": "42"}])
    demo = environment('[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "math"\n')
    (problem,) = demo.pool.take(1)
    (tmp_path / "replay").mkdir()
    recorder = ReplayRecorder(tmp_path / "replay", demo, tokenizer, seed=0, sample_rate=1.0, per_failure=1)
    (path,) = recorder.write(1, [trajectory_of(demo, demo.grader.answer_ids(problem, "42"), problem=problem)])

    async def checks() -> list[Check]:
        return [check async for check in replay(read_bundle(path), tokenizer)]

    found = {check.name: check.difference for check in asyncio.run(checks())}
    assert found == dict.fromkeys(found)
    assert {"prompt", "grade"} <= found.keys()


def test_a_conversation_is_part_of_what_a_saved_position_belongs_to(make_pool: MakePool, tmp_path: Path) -> None:
    def pool(prompt: Any) -> Pool:
        path = write(tmp_path / "data.jsonl", [{"prompt": prompt, "label": "42"}])
        return make_pool({"type": "jsonl", "path": path, "task_type": "math"})

    shorter, longer = pool(CHAT[2:]), pool(CHAT)
    assert shorter.order.fingerprint != longer.order.fingerprint
    assert pool("And 6 * 7?").order.fingerprint == pool(CHAT[3:]).order.fingerprint


def test_two_system_messages_are_one_too_many(environment: Make, tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [{"prompt": CHAT, "label": "42"}])
    demo = environment('system = "Think."\n[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "math"\n')
    with pytest.raises(UserError, match="problem demo/0: its prompt has a system message, and so does"):
        demo.leave_out_overlong(1000, 10)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"input": "?", "prompt": "?", "label": "1"},
            "'prompt' and 'input' may both be meant: set problem_field to one",
        ),
        (
            {"input": "?", "answer": "1", "label": "1"},
            "'answer' and 'label' may both be meant: set answer_field to one",
        ),
        ({"text": "?", "label": "1"}, "no field 'problem' or 'question' or 'prompt' or 'input'; the fields are 'text'"),
        (
            {"prompt": "?", "reward_spec": {"method": "rule"}},
            "no field 'answer' or 'label' or 'reward_spec.ground_truth'",
        ),
        (
            {"prompt": "?", "reward_spec": {"ground_truth": ["1"]}},
            "'reward_spec.ground_truth' holds the array ['1'], not text",
        ),
        ({"prompt": [], "label": "1"}, "'prompt' is an empty list"),
        ({"prompt": CHAT[:3], "label": "1"}, "'prompt' ends with a message by 'assistant'"),
        ({"prompt": [{"role": "user", "content": " "}], "label": "1"}, "field 'prompt[0]' is empty"),
        (
            {"prompt": [{"role": "user", "content": 3}], "label": "1"},
            "prompt[0]: the content is the number 3, not text",
        ),
        ({"prompt": [{"role": "boss", "content": "?"}], "label": "1"}, "prompt[0]: the role is 'boss'"),
        (
            {"prompt": [{"role": "assistant", "content": ""}, *ASKED], "label": "1"},
            "prompt[0]: the assistant says nothing",
        ),
        ({"prompt": ["?"], "label": "1"}, "prompt[0] is '?', not a message"),
        ({"prompt": 3, "label": "1"}, "field 'prompt' holds the number 3, not text"),
        ({"input": "?", "label": " "}, "field 'label' is empty"),
        ({"input": "?", "label": None}, "the field 'label' is null; fill it in"),
    ],
)
def test_a_record_that_fits_no_form_is_named(
    make_pool: MakePool, tmp_path: Path, record: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "data.jsonl", [record])
    with pytest.raises(UserError) as caught:
        make_pool({"type": "jsonl", "path": path, "task_type": "math"})
    assert str(caught.value).startswith(f"{path}:1: ")
    assert said in str(caught.value)


def test_the_first_record_s_form_holds_for_all(make_pool: MakePool, tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"input": "?", "label": "1"}, {"prompt": "?", "answer": "1"}])
    with pytest.raises(UserError, match=r"data\.jsonl:2: no field 'input'; the fields are 'prompt', 'answer'"):
        make_pool({"type": "jsonl", "path": path, "task_type": "math"})


def test_a_field_in_an_object_can_be_named(make_pool: MakePool, tmp_path: Path) -> None:
    record = {"prompt": ASKED, "input": "x", "extra": {"gold": "42"}, "a.b": "43"}
    for name in ("data.jsonl", "data.parquet"):
        path = write(tmp_path / name, [record])
        pool = {"type": Path(name).suffix[1:], "path": path, "task_type": "math", "problem_field": "prompt"}
        assert make_pool({**pool, "answer_field": "extra.gold"}).take(1)[0].gold == "42"
        assert make_pool({**pool, "answer_field": "a.b"}).take(1)[0].gold == "43"
        with pytest.raises(UserError, match=r":1|row 1"):
            make_pool({**pool, "answer_field": "extra.silver"})


def test_tasks_that_write_their_own_question_keep_the_conversation(make_pool: MakePool, tmp_path: Path) -> None:
    record = {"prompt": CHAT, "answer": "B", "choices": ["41", "42"]}
    path = write(tmp_path / "data.jsonl", [record])
    (problem,) = make_pool({"type": "jsonl", "path": path, "task_type": "multiple_choice"}).take(1)
    assert problem.question == "And 6 * 7?\n\nA. 41\nB. 42"
    assert len(problem.history) == 3
