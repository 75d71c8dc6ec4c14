"""Added tokens that a tokenizer's files do not call special: some are text, as Gemma's for two line breaks, and some write roles,
as DeepSeek's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import GEMMA, GEMMA_CONTROLS, save

from nmoe.errors import UserError
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.renderers import IGNORED, ChatRenderer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

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
