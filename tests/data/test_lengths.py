"""One length: the positions that a model runs decide what fits its context, for examples, pairs, rewards and verifiers alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import qwen

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.examples import read_examples
from nmoe.data.pairs import answer_pair, completion_pair, read_pairs
from nmoe.errors import UserError
from nmoe.recipes.preferences import completion_batch, reward_batch
from nmoe.recipes.sft import example_batch
from nmoe.text.renderers import ChatRenderer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier.form import DiscriminativeForm, GenerativeForm, form_batch

ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo!"}
LATER = {"role": "user", "content": "thanks " * 20}
# Inputs of the template's <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n and what follows up to <|im_end|>, which is
# the last token that is predicted.


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return qwen(tmp_path / "tokenizer")


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., DatasetSettings]:
    def write(record: dict[str, Any]) -> DatasetSettings:
        (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
        return DatasetSettings(path=str(tmp_path / "data.jsonl"))

    return write


@pytest.mark.parametrize("tail", [[], [LATER]], ids=["a line break follows", "a message follows"])
def test_an_example_fits_the_context_that_its_inputs_fill(
    tail: list[dict[str, str]], tokenizer: Tokenizer, written: Callable[..., DatasetSettings]
) -> None:
    settings, renderer = written({"messages": [ASKED, SAID, *tail]}), ChatRenderer(tokenizer)
    prompt = renderer.prompt_ids([Message("user", "hi")])
    # The template writes empty reasoning, unless more follows.
    said = tokenizer.encode("yo!", control_tokens=True) if tail else tokenizer.encode(
        "<think>\n\n</think>\n\nyo!", control_tokens=True
    )  # fmt: skip
    inputs = [*prompt, *said]  # <|im_end|> is predicted from the last of these
    (example,) = read_examples(settings, renderer, tokenizer, len(inputs)).listed()
    assert example_batch([example]).inputs_T.tolist() == inputs
    with pytest.raises(UserError, match=rf"1 are longer than its context of {len(inputs) - 1} tokens"):
        read_examples(settings, renderer, tokenizer, len(inputs) - 1)


@pytest.mark.parametrize(("make", "batch"), [(completion_pair, completion_batch), (answer_pair, reward_batch)])
def test_a_pair_fits_the_context_that_the_inputs_of_its_longer_side_fill(
    make: Any, batch: Any, tokenizer: Tokenizer, written: Callable[..., DatasetSettings]
) -> None:
    settings = written({"prompt": [ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "no, not that"}]})
    renderer = ChatRenderer(tokenizer)
    (pair,) = read_pairs(settings, renderer, make, 10**6).pairs
    longest = max(batch([pair]).lengths)
    assert longest == max(pair.positions)
    assert len(read_pairs(settings, renderer, make, longest).pairs) == 1
    with pytest.raises(UserError, match=rf"longer than the model's context of {longest - 1} tokens"):
        read_pairs(settings, renderer, make, longest - 1)


@pytest.mark.parametrize(
    "form", [lambda t: DiscriminativeForm(t, "step"), lambda t: GenerativeForm(t, "step")], ids=["head", "generative"]
)
def test_a_verifier_judges_in_use_what_it_fits_in_training(form: Any) -> None:
    tokenizer = Tokenizer.train(["2 + 2 = 4"], 300)
    made, messages, steps = form(tokenizer), [Message("user", "2+2?")], ["2+2=4", "so 4"]
    trained = form_batch([made.training(messages, steps, ["+", "-"])])
    longest = max(trained.lengths)
    fits, cut = (made.question(messages, steps, context) for context in (longest, longest - 1))
    judgements = [sum(len(one.counts or one.scored) if isinstance(made, DiscriminativeForm) else 1 for one in group) for group in (fits, cut)]  # noqa: E501  # fmt: skip
    classes = 1 if isinstance(made, DiscriminativeForm) else len(made.classes)
    assert judgements == [2 * classes, 1 * classes]
    assert max(form_batch([fits]).lengths) == longest
