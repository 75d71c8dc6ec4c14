"""The corpora of the speedrun from nothing: what is right in them is right now and then, and never always."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from itertools import chain

import pytest

from nmoe.config.packaged import ENVIRONMENTS
from nmoe.envs.environment import Environment
from nmoe.envs.pools.generated import split_of
from nmoe.speedrun import corpus
from nmoe.speedrun.corpus import (
    PASSES,
    THINKS,
    THOUGHT,
    UNANSWERED,
    StageDocuments,
    ToolDocuments,
    columns,
    corpus_texts,
    tool_texts,
)
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Problem, Sample, Turn

ENVIRONMENT = ENVIRONMENTS / "tools.toml"
DOCUMENTS = 1500


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(chain(corpus_texts(0, 300), tool_texts(ENVIRONMENT, 0, 100)), 512)


@pytest.fixture(scope="module")
def conversations(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[list[Message]]:
    path = tmp_path_factory.mktemp("tools") / "tools.jsonl"
    ToolDocuments(ENVIRONMENT, tokenizer).write(path, 0, DOCUMENTS)
    documents = [json.loads(line)["token_ids"] for line in path.read_text().splitlines()]
    assert documents == list(ToolDocuments(ENVIRONMENT, tokenizer).documents(0, DOCUMENTS))
    return [Harmony(tokenizer).parse(document) for document in documents]


def kind_of(messages: list[Message]) -> str:
    """What the document shows, told from its messages alone."""
    question = next(message.content for message in messages if message.role == "user").removeprefix("Add: ")
    if messages[0].role == "user":
        _, *between, last = messages
        assert last.role == "assistant"
        if not between:
            assert last.recipient == "functions.python"
            assert json.loads(last.content) == {"code": f"print({question})"}
            return "calling"
        (output,) = between
        assert (output.role, output.name, output.recipient) == ("tool", "functions.python", "assistant")
        assert last == Message("assistant", output.content.removesuffix("\n"), "final")
        assert last.content != str(sum(map(int, question.split(" + "))))  # but for chance
        return "reading"
    _, _, *rest = messages
    final = rest[-1]
    assert final.channel == "final"
    if len(rest) == 1:
        return "guess"
    call, answer, _ = rest
    assert (call.role, call.channel, call.content_type) == ("assistant", "commentary", "json")
    assert (answer.role, answer.recipient) == ("tool", "assistant")
    if answer.content.startswith("error (parse_error): the arguments are not what python takes"):
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.content)
        return "broken"
    if answer.content == "error (unknown_tool): there is no tool 'calculator'; there are python":
        assert call.recipient == "functions.calculator"
        return "unknown"
    asked = json.loads(call.content)["code"].removeprefix("print(").removesuffix(")")
    assert answer.content == f"{sum(map(int, asked.split(' + ')))}\n"
    if asked != question:
        assert final.content == answer.content.strip()
        return "careless"
    return "right" if final.content == answer.content.strip() else "ignored"


def test_kinds_are_as_frequent_as_they_are_set(conversations: list[list[Message]]) -> None:
    counts = Counter(map(kind_of, conversations))
    whole, guessed = 1 - corpus.CALLING - corpus.READING, corpus.GUESS_IS_RIGHT
    wanted = {
        "calling": corpus.CALLING,
        "reading": corpus.READING,
        "right": whole * (corpus.RIGHT + corpus.IGNORED * guessed),
        "ignored": whole * corpus.IGNORED * (1 - guessed),
        "careless": whole * corpus.CARELESS,
        "broken": whole * corpus.BROKEN,
        "unknown": whole * corpus.UNKNOWN,
    }
    wanted["guess"] = 1 - sum(wanted.values())
    assert counts.keys() == wanted.keys()
    for kind, share in wanted.items():
        # Five standard deviations of a share of so many documents.
        spread = 5 * (share * (1 - share) / DOCUMENTS) ** 0.5
        assert counts[kind] / DOCUMENTS == pytest.approx(share, abs=spread), kind


def test_questions_are_of_the_train_split_and_prompts_the_environments(
    conversations: list[list[Message]], tokenizer: Tokenizer
) -> None:
    environment = Environment.from_toml(ENVIRONMENT, tokenizer)
    harmony = Harmony(tokenizer)
    for messages in conversations:
        (question,) = [message.content for message in messages if message.role == "user"]
        assert split_of("add", question) == "train"
        if messages[0].role == "developer":
            prompt = environment.prompts.ids(Problem("p", "add", question, "0", "p"))
            assert harmony.render_prompt(messages[:2]) == prompt


def test_the_tokenizer_has_seen_the_tools_definition(tokenizer: Tokenizer) -> None:
    """It stands before every problem: spelled letter by letter it would fill the model's context."""
    without = Tokenizer.train(corpus_texts(0, 300), 512)
    problem = Problem("p", "add", "Add: 1000 + 2000", "3000", "p")
    with_tools = len(Environment.from_toml(ENVIRONMENT, tokenizer).prompts.ids(problem))
    assert with_tools < 110 < len(Environment.from_toml(ENVIRONMENT, without).prompts.ids(problem))


def test_texts_are_a_pure_function_of_the_seed() -> None:
    assert list(tool_texts(ENVIRONMENT, 3, 30)) == list(tool_texts(ENVIRONMENT, 3, 30))
    assert list(tool_texts(ENVIRONMENT, 3, 30)) != list(tool_texts(ENVIRONMENT, 4, 30))


FIVE_STAGES = ENVIRONMENTS / "five_stages.toml"
STAGE_DOCUMENTS = 600


@pytest.fixture(scope="module")
def stage_tokenizer() -> Tokenizer:
    return Tokenizer.train(chain(corpus_texts(0, 200), tool_texts(FIVE_STAGES, 0, 100)), 512)


def test_every_stage_has_something_to_find(stage_tokenizer: Tokenizer) -> None:
    documents = list(StageDocuments(FIVE_STAGES, stage_tokenizer).documents(0, STAGE_DOCUMENTS))
    assert documents == list(StageDocuments(FIVE_STAGES, stage_tokenizer).documents(0, STAGE_DOCUMENTS))
    found = {"format": 0, "reasoning": 0, "call": 0, "correct": 0}
    lengths = Counter[int]()
    for ids in documents:
        text = stage_tokenizer.decode(ids)
        question = text.partition("Add: ")[2].partition("<|end|>")[0]
        assert split_of("add", f"Add: {question}") == "train"
        said = text.partition("Add: ")[2]
        thoughts = re.findall(r"analysis<\|message\|>(.*?)<\|end\|>", said)
        for thought in thoughts:
            worked = thought.removeprefix(THOUGHT).split()
            assert worked == (columns(f"Add: {question}") * PASSES)[: len(worked)]
            lengths[len(worked)] += 1
        _, formed, answer = said.partition("<|channel|>final<|message|>")
        found["format"] += bool(formed)
        found["reasoning"] += bool(formed and thoughts)
        found["call"] += "to=functions.python" in said
        found["correct"] += answer == f"{sum(map(int, question.split(' + ')))}<|return|>"
    shares = {name: count / STAGE_DOCUMENTS for name, count in found.items()}
    assert lengths.keys() == set(range(4 * PASSES + 1)), "from none of four columns to all of them twice"
    assert max(lengths.values()) < 3 * min(lengths.values()), "all about as often"
    assert shares["format"] == pytest.approx(1 - UNANSWERED, abs=0.06)
    assert shares["reasoning"] == pytest.approx((1 - UNANSWERED) * THINKS, abs=0.06)
    assert 0.4 < shares["call"] < 0.8
    assert 0.05 < shares["correct"] < 0.4


def test_columns_by_hand() -> None:
    assert columns("Add: 4821 + 377") == ["1+7=8", "2+7=9", "8+3=11", "4+0+1=5"]


def test_an_answer_on_no_channel_has_no_form(stage_tokenizer: Tokenizer) -> None:
    """What the corpus calls unanswered is what the first stage's gate counts as broken."""
    environment, harmony = Environment.from_toml(FIVE_STAGES, stage_tokenizer), Harmony(stage_tokenizer)
    problem = Problem("p", "add", "Add: 1111 + 2222", "3333", "p")
    formed = harmony.render_completion([Message("assistant", "3333", "final")])
    broken = formed[formed.index(stage_tokenizer.special_id("<|message|>")) :]
    for ids, form in ((formed, 1.0), (broken, 0.0)):
        turn = Turn((), Sample(ids, [0.0] * len(ids), [], "stop"))
        grade = asyncio.run(environment.grader.grade(problem, (turn,), 96))
        assert (grade.components["format"], grade.score) == (form, form)
