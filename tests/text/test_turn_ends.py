"""Tokens of structure: the ends of a turn, and added tokens that are text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_templates import GEMMA, GEMMA_CONTROLS, gemma, qwen, save
from tiny_models import DENSE

import nmoe
from nmoe.data.examples import render
from nmoe.data.records import Conversation
from nmoe.errors import UserError
from nmoe.generation import sampling_notes
from nmoe.model.checkpoint import load_model, save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.runs.conversions import export_checkpoint
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.renderers import IGNORED, ChatRenderer, HarmonyRenderer, PlainRenderer, Round
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

MESSAGES = [("user", "1?"), ("assistant", "one"), ("user", "2?"), ("assistant", "two")]


def ended_in(directory: Path, ends: object) -> Tokenizer:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Tokenizer.load(directory)


def test_greedy_completions_are_those_of_transformers_with_the_same_generation_config(tmp_path: Path) -> None:
    """The released layout: transformers saves model and generation_config.json, and both libraries stop at the second end."""
    import transformers

    tokenizer = gemma(tmp_path)
    eos, end = tokenizer.special_id("<eos>"), tokenizer.special_id("<end_of_turn>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = eos
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = [{"role": "user", "content": "hi"}]
    prompt = theirs.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    model.generation_config.eos_token_id = [eos]
    free = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :].tolist()
    # Where it says a new token for the sixth time, it says <end_of_turn> from now on.
    sixth = list(dict.fromkeys(free))[5]
    with torch.no_grad():
        model.lm_head.weight[[sixth, end]] = model.lm_head.weight[[end, sixth]]
    model.generation_config.eos_token_id = [eos, end]
    model.save_pretrained(tmp_path)
    said = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert said == [*free[: free.index(sixth)], end]
    [[completion]] = nmoe.generate(tmp_path, "hi", max_new_tokens=20, temperature=0.0)
    assert (list(completion.token_ids), completion.finish_reason) == (said, "stop")
    assert completion.text == tokenizer.decode(said[:-1]).strip()  # the end is no part of what is said


def test_each_turn_of_a_conversation_is_learned_up_to_the_end_that_the_template_writes(tmp_path: Path) -> None:
    import transformers

    tokenizer = gemma(tmp_path)
    renderer = ChatRenderer(tokenizer)
    messages = tuple(ChatMessage(role, text) for role, text in MESSAGES)
    (rendered,) = render(Conversation("x", messages, ()), renderer, tokenizer)
    dicts = [{"role": role, "content": text} for role, text in MESSAGES]
    assert rendered.ids == transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        dicts, return_dict=False
    )
    learned = [label for label in rendered.labels if label != IGNORED]
    assert tokenizer.decode(learned) == "one<end_of_turn>two<end_of_turn>"
    for index in (1, 3):  # what sampling is asked for is what is learned from
        prompt = renderer.prompt_ids([Message(role, text) for role, text in MESSAGES[:index]])
        assert rendered.ids[: len(prompt)] == prompt
        assert rendered.labels[len(prompt)] != IGNORED


@pytest.mark.parametrize("end", ["<eos>", "<end_of_turn>"])
def test_a_turn_that_ended_at_either_end_stays_in_the_history_as_it_was_sampled(end: str, tmp_path: Path) -> None:
    tokenizer = gemma(tmp_path)
    renderer = ChatRenderer(tokenizer)
    said = [*tokenizer.encode("one"), tokenizer.special_id(end)]
    assert renderer.parse([said]).text == "one"
    assert renderer.parse([said]).well_formed
    unended = renderer.parse([said[:-1]])  # it did not end by itself
    assert (unended.well_formed, unended.structure) == (False, 0.0)
    assert renderer.said(said) == (None, "one")
    given, after = renderer.follow_up([Message("user", "1?")], [Round([said], [[]], "2?")])
    # The tokens between are those that the template writes after its own end, whichever end was sampled.
    assert (given, tokenizer.decode(after)) == (
        "user",
        "\n<start_of_turn>user\n2?<end_of_turn>\n<start_of_turn>model\n",
    )


def test_the_formats_take_the_ends_of_the_generation_settings(tmp_path: Path) -> None:
    harmony = Tokenizer.train(["a"], 300)
    harmony.save(tmp_path)
    assert not (tmp_path / "generation_config.json").exists()  # one end, which the tokenizer names itself
    returns, call, over = (harmony.special_id(f"<|{name}|>") for name in ("return", "call", "endoftext"))
    assert HarmonyRenderer(harmony).stop_ids == (returns, call)
    released = ended_in(tmp_path, [returns, over, call])  # as gpt-oss has them
    assert HarmonyRenderer(released).stop_ids == (returns, call, over)
    assert PlainRenderer(released).stop_ids == (over, returns, call)
    said = HarmonyRenderer(released).parse([[*released.encode("hm"), over]])
    # Ended, and not as a turn of Harmony ends.
    assert not said.well_formed
    assert 0 < said.structure < 1 / 3
    assert PlainRenderer(released).said([*released.encode("hm"), call]) == (None, "hm")


def test_ids_that_stand_for_text_end_nothing(tmp_path: Path) -> None:
    tokenizer = qwen(tmp_path)
    digit = tokenizer.encode("2")[0]
    assert ended_in(tmp_path, [digit, 10**6]).end_ids == (tokenizer.special_id("<|im_end|>"),)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.special_id("<|endoftext|>")}))
    loaded = Tokenizer.load(tmp_path)  # without generation_config.json transformers reads config.json
    assert loaded.end_ids == (tokenizer.special_id("<|im_end|>"), tokenizer.special_id("<|endoftext|>"))


@pytest.mark.parametrize("ends", ["<eos>", [1, None], True, [[1]], -1, 1.5])
def test_ends_that_are_no_ids_are_refused(ends: object, tmp_path: Path) -> None:
    save(tmp_path, GEMMA, GEMMA_CONTROLS)
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id is .*; it is a token's id or a list"):
        ended_in(tmp_path, ends)


def test_without_the_templates_end_the_refusal_says_where_to_name_it(tmp_path: Path) -> None:
    save(tmp_path, GEMMA, GEMMA_CONTROLS)
    messages = tuple(ChatMessage(role, text) for role, text in MESSAGES)
    with pytest.raises(UserError, match=r"'<eos>'.*generation_config\.json \(name the template's end"):
        ChatRenderer(Tokenizer.load(tmp_path)).supervise(messages)


def test_ends_stay_with_the_tokenizer_a_checkpoint_and_its_export(tmp_path: Path) -> None:
    tokenizer = gemma(tmp_path / "base")
    ends = [tokenizer.special_id(token) for token in ("<eos>", "<end_of_turn>")]
    tokenizer.save(tmp_path / "alone")
    assert json.loads((tmp_path / "alone/generation_config.json").read_text()) == {"eos_token_id": ends}
    alone = Tokenizer.load(tmp_path / "alone")
    assert (alone.end_ids, alone.fingerprint) == (tuple(ends), tokenizer.fingerprint)
    single = Tokenizer.load(save(tmp_path / "single", GEMMA, GEMMA_CONTROLS))
    assert single.fingerprint != tokenizer.fingerprint

    # A checkpoint of a run: the model's generation settings, and the tokenizer's ends where they lack one.
    model = Transformer(ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size})).initialize(0)
    model.generation = {"eos_token_id": ends[0], "temperature": 0.6}
    for name in ("run", "out"):
        (tmp_path / name).mkdir()
    save_model(model, tmp_path / "run")
    tokenizer.save(tmp_path / "run")
    kept = {"eos_token_id": ends, "temperature": 0.6}
    assert load_model(tmp_path / "run").generation == kept
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == kept
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == ends


def test_ends_of_the_model_hold_under_another_tokenizer(tmp_path: Path) -> None:
    tokenizer = gemma(tmp_path / "base")
    alone = save(tmp_path / "alone", GEMMA, GEMMA_CONTROLS)
    assert Tokenizer.load(alone, tmp_path / "base").end_ids == tokenizer.end_ids


def test_a_turn_is_ended_as_the_template_writes_it_even_by_token_0(tmp_path: Path) -> None:
    controls = ("<end_of_turn>", *(control for control in GEMMA_CONTROLS if control != "<end_of_turn>"))
    tokenizer = ended_in(save(tmp_path, GEMMA, controls), [controls.index("<eos>"), 0])
    template = ChatTemplate(tokenizer)
    assert (tokenizer.special_id("<end_of_turn>"), template.stop_ids) == (0, (controls.index("<eos>"), 0))
    assert template.completion_ids("one") == [*tokenizer.encode("one"), 0]


@pytest.mark.parametrize(
    ("settings", "used", "note"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, (1.0, 1.0, 0), "temperature 0.6, top_p 0.95, top_k 20; here it is temperature 1, top_p 1, top_k 0"),  # noqa: E501
        ({"temperature": 0.6, "top_p": 0.95}, (0.6, 0.95, 0), None),
        ({"temperature": 0.6, "top_p": 0.95}, (0.0, 1.0, 0), "temperature 0.6; here it is temperature 0"),
        ({"do_sample": False, "temperature": 0.6}, (1.0, 1.0, 0), "temperature 0; here it is temperature 1"),
        ({"do_sample": False}, (0.0, 1.0, 0), None),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95}, (0.0, 0.9, 0), None),
        ({"temperature": 0.6}, (0.6, 0.9, 4), "top_p 1; here it is top_p 0.9"),
        ({"do_sample": True, "top_p": None}, (0.7, 1.0, 0), "temperature 1; here it is temperature 0.7"),
        ({"do_sample": True}, (1.0, 1.0, 0), None),
        ({"top_p": 0.8}, (0.0, 1.0, 0), "temperature 1; here it is temperature 0"),
        ({}, (0.7, 0.9, 4), None),
    ],
)  # fmt: skip
def test_another_sampling_than_that_of_the_authors_is_noted(
    settings: dict[str, object], used: tuple[float, float, int], note: str | None, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    said = f"sampling: {tmp_path}/generation_config.json has {note}"
    assert sampling_notes(tmp_path, *used) == ([] if note is None else [said])


# In the style of DeepSeek-V3: roles in bars, calls only beside no content, and nothing behind a single call.
ROLES = ("<｜User｜>", "<｜Bot｜>", "<｜calls｜>", "<｜out｜>", "<|fim|>")
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜out｜>' + m.content }}"
    "{% elif m.content is none %}{{ '<｜Bot｜><｜calls｜>' }}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% if not loop.first %}{{ '<end>' }}{% endif %}"
    "{% endfor %}{% else %}{{ '<｜Bot｜>' + m.content + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Bot｜>' }}{% endif %}"
)
ADD = ToolDefinition("add", "Adds.", None)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save(tmp_path_factory.mktemp("roles"), DEEPSEEK, ("<begin>", "<end>"), ROLES))


def test_added_tokens_that_are_text_are_encoded_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save(tmp_path, GEMMA.replace("'<end_of_turn>\\n'", "'<end_of_turn>\\n\\n'"), GEMMA_CONTROLS, ("\n\n", "<b>"))
    tokenizer, other = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    breaks, bold = (other.convert_tokens_to_ids(one) for one in ("\n\n", "<b>"))
    assert not {breaks, bold} & set(tokenizer.added_tokens.values())
    ids = ChatRenderer(tokenizer).prompt_ids([Message("user", "a\n\nb <b>")])
    asked = [{"role": "user", "content": "a\n\nb <b>"}]
    assert ids == other.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert (ids.count(breaks), ids.count(bold)) == (2, 1)
    # Even where the template itself writes it, white space is no structure that a text could forge.
    assert tokenizer.encode("a\n\nb", control_tokens=True) == other.encode("a\n\nb", add_special_tokens=False)


def test_roles_are_structure_in_texts_and_in_sampled_turns(deepseek: Tokenizer, tmp_path: Path) -> None:
    assert {*ROLES} < {*deepseek.added_tokens}
    assert not {*deepseek.encode("".join(ROLES))} & {*deepseek.added_tokens.values()}
    renderer, roles = ChatRenderer(deepseek), {deepseek.special_id(one) for one in ROLES}
    honest, forged = (
        renderer.prompt_ids([Message("user", text), Message("assistant", text), Message("user", text)])
        for text in ("a", "".join(ROLES))
    )
    assert [one for one in forged if one in roles] == [one for one in honest if one in roles]
    for text, holds in (("42", True), ("42<｜User｜>more", False)):
        turn = [*deepseek.encode(text, control_tokens=True), renderer.stop_ids[0]]
        assert renderer.parse([turn]).well_formed is holds
    deepseek.save(tmp_path)
    special = {
        one["content"]: one["special"] for one in json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    }
    assert special == {"<begin>": True, "<end>": True, **dict.fromkeys(ROLES, False)}  # as they came
    assert Tokenizer.load(tmp_path).fingerprint == deepseek.fingerprint


def test_calls_beside_no_content_are_written_and_end_before_their_answers(deepseek: Tokenizer) -> None:
    renderer = ChatRenderer(deepseek)
    one, other = FunctionCall("add", {"x": 1}), FunctionCall("add", '{"x":2}')
    asked, answer, said = ChatMessage("user", "q"), ChatMessage("tool", "5"), ChatMessage("assistant", "done")
    (rendered,) = renderer.supervise((asked, ChatMessage("assistant", "", calls=(one, other)), answer, said))
    assert deepseek.decode(rendered.ids).endswith(
        '<｜Bot｜><｜calls｜>add{"x": 1}add{"x":2}<end><｜out｜>5<｜Bot｜>done<end>'
    )
    learned = deepseek.decode([label for label in rendered.labels if label != IGNORED])
    assert learned == '<｜calls｜>add{"x": 1}add{"x":2}<end>done<end>'
    for answered in (answer, ChatMessage("tool", "")):
        with pytest.raises(UserError, match=r"does not end messages\[1\], the assistant's, before the next one begins"):
            renderer.supervise((asked, ChatMessage("assistant", "", calls=(one,)), answered, said))


def test_tools_that_neither_template_nor_messages_name_are_refused(deepseek: Tokenizer) -> None:
    template = ChatTemplate(deepseek, [ADD])
    with pytest.raises(
        UserError, match="does not declare tools, so the policy cannot know add; describe each by its name"
    ):
        template.prompt_ids([Message("user", "1 + 2?")])
    assert deepseek.decode(template.prompt_ids([Message("user", "Use add.")])) == "<begin><｜User｜>Use add.<｜Bot｜>"
