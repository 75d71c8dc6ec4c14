"""Records: every format as people and docs/guides/data.md have it, found by its columns; broken ones named with file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nmoe.config.tables.recipes import DatasetSettings, Kind
from nmoe.data.records import (
    Conversation,
    Preference,
    Prompt,
    PromptCompletion,
    Record,
    Stepwise,
    Text,
    detect,
    read_records,
)
from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition

USER, ANSWER, WRONG = ChatMessage("user", "6 * 7?"), ChatMessage("assistant", "42"), ChatMessage("assistant", "13")
ASKED = [{"role": "user", "content": "6 * 7?"}]
SAID, MISSAID = [{"role": "assistant", "content": "42"}], [{"role": "assistant", "content": "13"}]


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str, **settings: Any) -> list[Record]:
    return list(read_records(DatasetSettings(path=path, **settings)))


CASES: list[tuple[str, dict[str, Any], Record]] = [
    ("text", {"text": "Once."}, Text("W", "Once.")),
    ("messages", {"messages": ASKED + SAID, "id": 7}, Conversation("W", (USER, ANSWER))),
    ("messages", {"messages": json.dumps(ASKED + SAID)}, Conversation("W", (USER, ANSWER))),
    ("prompt", {"prompt": "6 * 7?"}, Prompt("W", (USER,))),
    ("prompt", {"prompt": ASKED}, Prompt("W", (USER,))),
    ("prompt_completion", {"prompt": "6 * 7?", "completion": "42"}, PromptCompletion("W", (USER,), (ANSWER,))),
    ("prompt_completion", {"prompt": ASKED, "completion": SAID}, PromptCompletion("W", (USER,), (ANSWER,))),
    ("prompt_completion", {"prompt": ASKED, "completion": "42"}, PromptCompletion("W", (USER,), (ANSWER,))),
    (
        "preference",
        {"prompt": "6 * 7?", "chosen": "42", "rejected": "13"},
        Preference("W", (USER,), (ANSWER,), (WRONG,)),
    ),
    (
        "preference",
        {"prompt": ASKED, "chosen": SAID, "rejected": MISSAID, "score": 1.5},
        Preference("W", (USER,), (ANSWER,), (WRONG,)),
    ),
    (  # as ultrafeedback has it: the prompt in a column and in both lists
        "preference",
        {"prompt": "6 * 7?", "chosen": ASKED + SAID, "rejected": ASKED + MISSAID},
        Preference("W", (USER,), (ANSWER,), (WRONG,)),
    ),
    (
        "preference",
        {"prompt": None, "chosen": ASKED + SAID + ASKED + SAID, "rejected": ASKED + SAID + ASKED + MISSAID},
        Preference("W", (USER, ANSWER, USER), (ANSWER,), (WRONG,)),
    ),
    (  # the answers begin with a message alike, which is no part of the prompt
        "preference",
        {"chosen": ASKED + SAID + SAID, "rejected": ASKED + SAID + MISSAID},
        Preference("W", (USER,), (ANSWER, ANSWER), (ANSWER, WRONG)),
    ),
    (
        "stepwise",
        {"prompt": "6 * 7?", "completions": ["a", "b", "c", "d"], "labels": [True, False, None, True]},
        Stepwise("W", (USER,), ("a", "b", "c", "d"), ("+", "-", None, "+")),
    ),
    (
        "stepwise",
        {"prompt": ASKED, "completions": [SAID, MISSAID, "c"], "labels": [1.0, -1, 0]},
        Stepwise("W", (USER,), ("42", "13", "c"), ("+", "-", "0")),
    ),
    (
        "stepwise",
        {"prompt": ASKED, "completions": ["a", "b", "c"], "labels": ["+", "0", "-"]},
        Stepwise("W", (USER,), ("a", "b", "c"), ("+", "0", "-")),
    ),
]


@pytest.mark.parametrize(("kind", "row", "record"), CASES)
def test_formats_are_told_by_their_columns(kind: str, row: dict[str, Any], record: Record, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", row)
    records = read_records(DatasetSettings(path=path))
    assert records.kind == kind
    assert records.described.startswith(f"{path}: records of kind {kind} (")
    (found,) = records
    assert found == type(record)(**{**record.__dict__, "where": f"{path}:1"})


def test_arrow_gives_the_same_records(tmp_path: Path) -> None:
    """Its objects have the keys of all rows, with None where a row has none of its own."""
    rows = [
        {"messages": ASKED + SAID, "tools": None},
        {
            "messages": [*ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        },
    ]
    expected = [record.__dict__ | {"where": ""} for record in read(write(tmp_path / "x.jsonl", *rows))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name in ("x.parquet", "saved"):
        assert [record.__dict__ | {"where": ""} for record in read(str(tmp_path / name))] == expected


def test_messages_with_tools_reasoning_and_parts(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "number"}}}
    function = {"name": "square", "description": "Squares.", "parameters": schema}
    row = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"from": "human", "value": "2 squared?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Use it.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "square", "arguments": '{"x": 2}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "name": "square", "content": "4"},
            {"role": "assistant", "content": "4", "channel": "final", "weight": 0},
            {"from": "gpt", "value": "Four."},
        ],
        "tools": json.dumps([{"type": "function", "function": function}]),
    }
    (record,) = read(write(tmp_path / "x.jsonl", row))
    assert record == Conversation(
        f"{tmp_path}/x.jsonl:1",
        (
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "2 squared?"),
            ChatMessage("assistant", "", reasoning="Use it.", calls=(FunctionCall("square", '{"x": 2}', "c1"),)),
            ChatMessage("tool", "4", name="square", call_id="c1"),
            ChatMessage("assistant", "4", channel="final", trained=False),
            ChatMessage("assistant", "Four."),
        ),
        (ToolDefinition("square", "Squares.", schema),),
    )


def test_fields_that_all_messages_have_are_empty_in_most(tmp_path: Path) -> None:
    asked = ASKED[0] | {"thinking": "", "tool_calls": []}
    said = {"role": "assistant", "content": "42", "reasoning_content": "", "thinking": "6 * 7 is 42."}
    (record,) = read(write(tmp_path / "x.jsonl", {"messages": [asked, said]}))
    assert record == Conversation(
        f"{tmp_path}/x.jsonl:1", (USER, ChatMessage("assistant", "42", reasoning="6 * 7 is 42."))
    )
    csv = tmp_path / "x.csv"
    csv.write_text("prompt,completion,tools\n6 * 7?,42,\n")
    assert read(str(csv)) == [PromptCompletion(f"{csv}:2", (USER,), (ANSWER,))]


def test_messages_may_be_written_as_json_wherever_a_text_may_stand(tmp_path: Path) -> None:
    row = {"prompt": json.dumps(ASKED), "chosen": json.dumps(ASKED + SAID), "rejected": json.dumps(ASKED + MISSAID)}
    assert read(write(tmp_path / "x.jsonl", row)) == [Preference(f"{tmp_path}/x.jsonl:1", (USER,), (ANSWER,), (WRONG,))]
    # As pandas writes a list into a CSV, and a text that only begins like one.
    with pytest.raises(UserError, match=r":1: 'prompt' is .*, messages as Python prints them; write them as JSON"):
        read(write(tmp_path / "x.jsonl", {"prompt": str(ASKED), "completion": "42"}))
    text = json.dumps(ASKED) + " How many messages are there?"
    (record,) = read(write(tmp_path / "x.jsonl", {"prompt": text, "completion": "1"}))
    assert isinstance(record, PromptCompletion)
    assert record.prompt == (ChatMessage("user", text),)
    table = json.dumps([{"role": "user", "content": ""}, 7, {"content": "{}", "role": None}])
    (record,) = read(write(tmp_path / "x.jsonl", {"prompt": "As JSON?", "completion": table}))
    assert isinstance(record, PromptCompletion)
    assert record.completion == (ChatMessage("assistant", table),)


def test_columns_can_be_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"question": "6 * 7?", "prompt": "template 3", "answer": "42", "text": "?"})
    (record,) = read(path, columns={"prompt": "question", "completion": "answer"})
    assert record == PromptCompletion(f"{path}:1", (USER,), (ANSWER,))
    described = read_records(
        DatasetSettings(path=path, columns={"prompt": "question", "completion": "answer"})
    ).described
    assert described.endswith("prompt_completion (prompt from 'question', completion from 'answer'; not read: 'text')")
    with pytest.raises(UserError, match=r"x\.jsonl:1: prompt from 'ask': there is no such column; the columns are"):
        read(path, columns={"prompt": "ask"})
    with pytest.raises(ValueError, match="'promt' is not a column of a format; the columns are text, messages"):
        DatasetSettings(path=path, columns={"promt": "question"})
    csv = tmp_path / "x.csv"
    csv.write_text('q,steps,marks\n6 * 7?,"[""a"", ""b""]","[1, -1]"\n')
    (record,) = read(str(csv), columns={"prompt": "q", "completions": "steps", "labels": "marks"})
    assert record == Stepwise(f"{csv}:2", (USER,), ("a", "b"), ("+", "-"))


def test_what_fits_two_kinds_is_an_error_unless_one_alone_is_of_use(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "?", "messages": ASKED + SAID, "chosen": SAID, "rejected": MISSAID})
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path}:1: the columns 'prompt', 'messages', 'chosen', 'rejected' fit messages and preference; choose one: "
        'kind = "messages" or kind = "preference"'
    )
    assert read_records(DatasetSettings(path=path), ["text", "messages", "prompt_completion"]).kind == "messages"
    assert read_records(DatasetSettings(path=path), ["preference"]).kind == "preference"
    assert read_records(DatasetSettings(path=path, kind="messages")).kind == "messages"
    with pytest.raises(UserError, match='kind = "messages" cannot be used here; preference is'):
        read_records(DatasetSettings(path=path, kind="messages"), ["preference"])


def test_a_part_of_another_kinds_columns_is_no_ambiguity() -> None:
    assert detect(["prompt", "completion", "tools", "id"]) == ["prompt_completion"]
    assert detect(["prompt", "chosen", "rejected"]) == ["preference"]
    assert detect(["prompt", "completions", "labels"]) == ["stepwise"]
    assert detect(["prompt", "messages"]) == ["messages", "prompt"]
    assert detect(["prompt", "completion", "chosen", "rejected"]) == ["prompt_completion", "preference"]
    assert detect(["question", "answer"]) == []


PAIR = {"prompt": "?", "chosen": "a", "rejected": "b"}
STEPS = {"prompt": "?", "completions": ["a", "b"], "labels": [True, False]}
CONVERSATION = {"messages": ASKED + SAID}
SILENT = {"role": "assistant", "content": ""}


def tool(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


COMPLETION = {"prompt": "?", "completion": "a"}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (COMPLETION, {"prompt": "?"}, "a record of kind prompt_completion has 'completion', and this one's columns are 'prompt'"),
        (COMPLETION, COMPLETION | {"completion": " "}, "'completion' is empty; fill it in or remove the record"),
        (COMPLETION, COMPLETION | {"completion": []}, "'completion' is an empty list"),
        (COMPLETION, COMPLETION | {"completion": [SILENT]}, r"completion\[0\]: the assistant says nothing"),
        (COMPLETION, COMPLETION | {"prompt": [*ASKED, SILENT, *ASKED]}, r"prompt\[1\]: the assistant says nothing"),
        (COMPLETION, COMPLETION | {"completion": ASKED}, "'completion' has a message by 'user' where the assistant's"),
        (COMPLETION, COMPLETION | {"completion": SAID + ASKED}, "'completion' has a message by 'user' where the assistant's"),
        (COMPLETION, COMPLETION | {"completion": 7}, "'completion' holds the number 7, neither a text nor a list of messages"),
        (COMPLETION, COMPLETION | {"prompt": ""}, "'prompt' is empty"),
        (COMPLETION, COMPLETION | {"prompt": SAID}, "'prompt' ends in a message of the assistant"),
        (PAIR, PAIR | {"chosen": "b"}, "'chosen' and 'rejected' are equal, so neither is preferred; remove the record"),
        (PAIR, PAIR | {"chosen": ASKED + SAID, "rejected": ASKED + SAID}, "'chosen' and 'rejected' are equal"),
        (PAIR, PAIR | {"chosen": ASKED + SAID, "rejected": ASKED + MISSAID}, r"'prompt' is '\?', and 'chosen' and 'rejected'"),
        (PAIR, PAIR | {"prompt": None}, "there is no 'prompt', and 'chosen' and 'rejected' are not message lists that begin alike"),
        (PAIR, PAIR | {"rejected": ""}, "'rejected' is empty"),
        (STEPS, STEPS | {"labels": [True]}, "there are 2 completions and 1 labels"),
        (STEPS, STEPS | {"labels": [True, 2]}, r"labels\[1\] is 2; a label is true or false, 1, 0 or -1"),
        (STEPS, STEPS | {"labels": [True, 0.5]}, r"labels\[1\] is 0\.5; a label is"),
        (STEPS, STEPS | {"labels": [True, "maybe"]}, r"labels\[1\] is 'maybe'"),
        (STEPS, STEPS | {"completions": [], "labels": []}, "'completions' is an empty list"),
        (STEPS, STEPS | {"completions": ["a", ""]}, r"'completions\[1\]' is empty"),
        (CONVERSATION, {"messages": []}, "'messages' is an empty list"),
        (CONVERSATION, {"messages": "hello"}, "'messages' is the text 'hello', not a list nor the JSON of one"),
        (CONVERSATION, {"messages": ASKED}, "no message is by the assistant"),
        (CONVERSATION, {"messages": [*ASKED, SAID[0] | {"weight": 0}]}, r"no message is by the assistant \(or each has weight 0\)"),
        (CONVERSATION, {"messages": [*ASKED, {"role": "assistant", "content": " "}]}, r"messages\[1\]: the assistant says nothing"),
        (CONVERSATION, {"messages": [{"role": "bot", "content": ""}]}, r"messages\[0\]: the role is 'bot'; the roles are system"),
        (CONVERSATION, {"messages": ["hi"]}, r"messages\[0\] is 'hi', not a message such as"),
        (CONVERSATION, {"messages": [{"role": "user"}, *SAID]}, r"messages\[0\]: the content is null, not text"),
        (CONVERSATION, {"messages": [{"role": "user", "content": [{"type": "image"}]}, *SAID]}, "part of the content is not text"),
        (CONVERSATION, {"messages": [*ASKED, SAID[0] | {"tool_calls": [{"name": ""}]}]}, r"messages\[1\]\.tool_calls\[0\] is"),
        (CONVERSATION, {"messages": [*ASKED, SAID[0] | {"channel": "secret"}]}, "the channel is 'secret'; the channels are"),
        (CONVERSATION, {"messages": [ASKED[0] | {"thinking": "hm"}, *SAID]}, "by 'user' has tool calls or reasoning"),
        (CONVERSATION, CONVERSATION | {"tools": [{"description": "?"}]}, r"tools\[0\] is .*, not a tool with a name"),
        (CONVERSATION, {"messages": [{"from": ["human"], "value": "?"}, *SAID]}, r"messages\[0\]: the role is \['human'\]"),
        (CONVERSATION, CONVERSATION | tool(7), r"tools\[0\]\.parameters is 7, not a JSON schema"),
        (CONVERSATION, CONVERSATION | tool({"properties": ["x"]}), r"its 'properties' is \['x'\], which is not valid"),
        (CONVERSATION, CONVERSATION | tool({"properties": {"x": True}}), r"parameters\.properties\.x is True, not a JSON schema"),
        (CONVERSATION, CONVERSATION | tool({"type": [1]}), r"its 'type' is \[1\]"),
        (CONVERSATION, CONVERSATION | tool({"type": "array", "items": [{}]}), r"parameters\.items is \[\{\}\], not a JSON schema"),
        ({"text": "a"}, {"text": 3}, "'text' holds the number 3, not text"),
    ],
)  # fmt: skip
def test_a_record_that_is_wrong_is_named(good: Any, bad: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", good, bad)
    with pytest.raises(UserError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert len(str(caught.value)) < 400
    assert len(read(path + "@[:1]")) == 1


def test_zeros_and_ones_alone_may_mean_either(tmp_path: Path) -> None:
    ratings = [{"prompt": "?", "completions": ["a", "b"], "labels": labels} for labels in ([1, 1], [1, 0], [1, -1])]
    path = write(tmp_path / "x.jsonl", *ratings)
    assert [record.labels for record in read(path) if isinstance(record, Stepwise)][1:] == [("+", "0"), ("+", "-")]
    with pytest.raises(
        UserError, match=r"x\.jsonl:2: a label 0, in data of labels 0 and 1 alone, may mean wrong or neutral"
    ):
        read(f"{path}@[:2]")
    assert len(read(f"{path}@[:1]")) == 1


def test_what_fits_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"question": "?", "answer": "!"})
    with pytest.raises(UserError) as caught:
        read_records(DatasetSettings(path=path), ["prompt_completion", "messages"])
    assert str(caught.value) == (
        f"{path}:1: the columns 'question', 'answer' fit no format (prompt_completion: prompt, completion; messages: messages); "
        'name the columns in `columns`, such as {prompt = "question", completion = "answer"} '
        "(`nmoe data show`: --column prompt=question --column completion=answer)"
    )
    path = write(tmp_path / "x.jsonl", {"messages": None})
    with pytest.raises(
        UserError, match=r"x\.jsonl:1: the columns none \(without 'messages', null in this record\) fit no f"
    ):
        read_records(DatasetSettings(path=path), ["prompt_completion", "messages"])
    with pytest.raises(UserError, match=r"x\.jsonl: no records"):
        read_records(DatasetSettings(path=write(tmp_path / "x.jsonl")))


PAGE = Path(__file__).parents[2] / "docs/guides/data.md"


def test_every_example_is_of_its_kind(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\{.*\})` \|$", PAGE.read_text(), re.MULTILINE)
    assert {kind for kind, _ in rows} == set(get_args(Kind))
    for kind, example in rows:
        path = tmp_path / "x.jsonl"
        path.write_text(json.dumps(json.loads(example)) + "\n")
        records = read_records(DatasetSettings(path=str(path)))
        assert records.kind == kind
        assert len(list(records)) == 1
