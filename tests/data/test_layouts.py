"""Datasets in the layouts of other makers are read by themselves, and say what was read as what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nmoe.config.commands import SFTConfig
from nmoe.config.loader import load_run
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.layouts import plain_columns
from nmoe.data.records import Conversation, Preference, PromptCompletion, Record, read_records
from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage, FunctionCall

USER, ANSWER, WRONG = ChatMessage("user", "6 * 7?"), ChatMessage("assistant", "42"), ChatMessage("assistant", "13")


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def one(path: Path, row: Any) -> tuple[Record, str]:
    records = read_records(DatasetSettings(path=write(path, row)))
    (record,) = records
    return record, records.described


@pytest.mark.parametrize(("answer", "letter"), [(0, "A"), (2, "C"), ("B", "B")])
def test_multiple_choice_as_mmlu_has_it(answer: object, letter: str) -> None:
    row = {"question": "2 + 2?", "choices": ["3", "5", "4"], "answer": answer, "subject": "sums"}
    columns, made = plain_columns(row)
    assert columns == {"prompt": "2 + 2?\n\nA. 3\nB. 5\nC. 4", "completion": letter, "subject": "sums"}
    assert made == {"prompt": "question and choices", "completion": "answer"}


@pytest.mark.parametrize("answer", [3, -1, "D", "AB", "", 1.0])
def test_an_answer_that_is_no_choice(answer: object) -> None:
    row = {"question": "2 + 2?", "choices": ["3", "5", "4"], "answer": answer}
    with pytest.raises(UserError, match="which is none of 3 choices"):
        plain_columns(row)


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    talk = [{"from": "human", "value": "6 * 7?"}, {"from": "gpt", "value": "42"}]
    assert one(path, {"id": "7", "conversations": talk}) == (
        Conversation(f"{path}:1", (USER, ANSWER)),
        f"{path}: records of kind messages (messages from conversations; not read: 'id')",
    )
    record, _ = one(path, {"system": "Be brief.", "conversations": talk})
    assert record == Conversation(f"{path}:1", (ChatMessage("system", "Be brief."), USER, ANSWER))


def test_calls_by_the_roles_that_sharegpt_and_older_chat_formats_have(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    call = FunctionCall("square", {"x": 2})
    wanted = (
        ChatMessage("user", "2 squared?"),
        ChatMessage("assistant", "", calls=(call,)),
        ChatMessage("tool", "4"),
        ChatMessage("assistant", "4"),
    )
    written = json.dumps({"name": "square", "arguments": {"x": 2}})
    turns = [("human", "2 squared?"), ("function_call", written), ("observation", "4"), ("gpt", "4")]
    record, _ = one(path, {"conversations": [{"from": who, "value": said} for who, said in turns]})
    assert record == Conversation(f"{path}:1", wanted)
    openai = [
        {"role": "user", "content": "2 squared?"},
        {"role": "assistant", "content": None, "function_call": {"name": "square", "arguments": {"x": 2}}},
        {"role": "function", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    assert one(path, {"messages": openai})[0] == Conversation(f"{path}:1", wanted)
    with pytest.raises(UserError, match=r"x.jsonl:1: messages\[1\]: a function_call is 'square\(2\)', not the JSON of"):
        one(path, {"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": "square(2)"}]})


def test_alpaca(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    row = {"instruction": "Multiply.", "input": "6 * 7?", "output": "42", "text": "### Instruction: ..."}
    assert one(path, row) == (
        PromptCompletion(f"{path}:1", (ChatMessage("user", "Multiply.\n\n6 * 7?"),), (ANSWER,)),
        f"{path}: records of kind prompt_completion (prompt from instruction and input, completion from output)",
    )
    record, _ = one(path, {"instruction": "6 * 7?", "input": "", "output": "42"})
    assert record == PromptCompletion(f"{path}:1", (USER,), (ANSWER,))
    (mapped,) = read_records(DatasetSettings(path=str(path), columns={"prompt": "instruction", "completion": "output"}))
    assert mapped == record
    with pytest.raises(UserError, match="'input' has to be a text, and is 7"):
        one(path, {"instruction": "Square the number.", "input": 7, "output": "49"})


def test_worked_answers_of_gsm8k_are_read_without_their_calculations(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    worked = "She has 48/2 = <<48/2=24>>24.\nIn all $<<48+24=72>>72, and 3 << 4 is kept.\n#### 72"
    record, _ = one(path, {"question": "6 * 7?", "answer": worked})
    kept = "She has 48/2 = 24.\nIn all $72, and 3 << 4 is kept.\n#### 72"
    assert record == PromptCompletion(f"{path}:1", (USER,), (ChatMessage("assistant", kept),))
    (mapped,) = read_records(DatasetSettings(path=str(path), columns={"prompt": "question", "completion": "answer"}))
    assert isinstance(mapped, PromptCompletion)
    assert mapped.completion[0].content == worked, "columns that are named are taken as they are"
    for answer in ("72", "#### 72\nis it", "The answer is #### 72"):
        with pytest.raises(UserError, match=r"x\.jsonl:1: "):
            one(path, {"question": "6 * 7?", "answer": answer})


def test_dialogues_of_hh_rlhf(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    before = "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: 6 * 7?\n\nAssistant:"
    record, _ = one(path, {"chosen": f"{before} 42", "rejected": f"{before} 13"})
    prompt = (ChatMessage("user", "hi"), ChatMessage("assistant", "Hello."), USER)
    assert record == Preference(f"{path}:1", prompt, (ANSWER,), (WRONG,))
    with pytest.raises(UserError, match=r"x.jsonl:1: 'rejected' is a dialogue that does not end with the assistant"):
        one(path, {"chosen": f"{before} 42", "rejected": "\n\nHuman: 6 * 7?"})


@pytest.mark.parametrize("name", ["speedrun_gpu_midtraining", "speedrun_gpu_sft"])
def test_the_reference_budget_reads_the_hubs_datasets(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    for file, row in (
        ("HuggingFaceTB/smol-smoltalk/train.jsonl", {"messages": talk, "source": "x"}),
        (
            "cais/mmlu/all/auxiliary_train.jsonl",
            {"question": "Even?", "subject": "", "choices": ["3", "4"], "answer": 1},
        ),
        ("openai/gsm8k/main/train.jsonl", {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}),
    ):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(json.dumps(row) + "\n")
    # The hub's page of MMLU names the files of this split, whose name is none of the usual ones.
    splits = "configs:\n- config_name: all\n  data_files:\n  - split: auxiliary_train\n    path: all/auxiliary_train*\n"
    (tmp_path / "cais/mmlu/README.md").write_text(f"---\n{splits}---\n")
    found = {}
    for source in load_run(Path(name), SFTConfig).records.sources:
        (record,) = read_records(source)
        assert isinstance(record, Conversation | PromptCompletion)
        messages = record.messages if isinstance(record, Conversation) else (*record.prompt, *record.completion)
        found[source.path.partition("@")[0]] = [message.content for message in messages]
    expected = {
        "HuggingFaceTB/smol-smoltalk": ["Hi.", "Hello."],
        "cais/mmlu": ["Even?\n\nA. 3\nB. 4", "B"],
        "openai/gsm8k": ["6 * 7?", "6 * 7 = 42\n#### 42"],
    }
    assert found == {path: expected[path] for path in found}
    assert found.keys() == expected.keys() - ({"cais/mmlu"} if name.endswith("sft") else set())
