"""The corpus of mid-training: well-formed conversations that call the python tool rightly only now and then."""

import json
from collections import Counter
from itertools import chain

import pytest

from nmoe.config.packaged import ENVIRONMENTS
from nmoe.envs.environment import Environment
from nmoe.envs.pools.generated import split_of
from nmoe.speedrun import tool_corpus
from nmoe.speedrun.corpus import corpus_texts
from nmoe.speedrun.tool_corpus import ToolDocuments, tool_texts
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Problem

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
    whole, guessed = 1 - tool_corpus.CALLING - tool_corpus.READING, tool_corpus.GUESS_IS_RIGHT
    wanted = {
        "calling": tool_corpus.CALLING,
        "reading": tool_corpus.READING,
        "right": whole * (tool_corpus.RIGHT + tool_corpus.IGNORED * guessed),
        "ignored": whole * tool_corpus.IGNORED * (1 - guessed),
        "careless": whole * tool_corpus.CARELESS,
        "broken": whole * tool_corpus.BROKEN,
        "unknown": whole * tool_corpus.UNKNOWN,
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
            prompt = environment.prompt_ids(Problem("p", "add", question, "0", "p"))
            assert harmony.render_prompt(messages[:2]) == prompt


def test_the_tokenizer_has_seen_the_tools_definition(tokenizer: Tokenizer) -> None:
    """It stands before every problem: spelled letter by letter it would fill the model's context."""
    without = Tokenizer.train(corpus_texts(0, 300), 512)
    problem = Problem("p", "add", "Add: 1000 + 2000", "3000", "p")
    with_tools = len(Environment.from_toml(ENVIRONMENT, tokenizer).prompt_ids(problem))
    assert with_tools < 110 < len(Environment.from_toml(ENVIRONMENT, without).prompt_ids(problem))


def test_texts_are_a_pure_function_of_the_seed() -> None:
    assert list(tool_texts(ENVIRONMENT, 3, 30)) == list(tool_texts(ENVIRONMENT, 3, 30))
    assert list(tool_texts(ENVIRONMENT, 3, 30)) != list(tool_texts(ENVIRONMENT, 4, 30))
