"""`nmoe chat`: the conversation is in the prompt, in the form that the model was made for, with calls that its tools answer."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from chat_templates import QWEN, QWEN_CONTROLS, QWEN_TAGS, llama, qwen, save
from tiny_models import DENSE

import nmoe
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Delta, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import UserError
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.sandbox.api import Limits, SandboxSetupError
from nmoe.serve import chat as command
from nmoe.serve.chat import Rendering, chat
from nmoe.serve.history import Answer, History
from nmoe.serve.terminal import Screen
from nmoe.text.calls.pieces import Piece
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.conversation import ChatMessage, FunctionCall
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import chat_format
from nmoe.types import Message, Sample

SAID = ChatMessage("assistant", "42", reasoning="hm")


def test_the_history_has_no_earlier_reasoning_and_keeps_calls_and_their_answers() -> None:
    history = History("Be brief.")
    history.ask("6 * 7?")
    calling = ChatMessage("assistant", "", reasoning="hm", calls=(FunctionCall("add", "{}", "0/0/0"),))
    history.add(calling)
    history.add(ChatMessage("tool", "42", name="add", call_id="0/0/0"))
    assert history.messages[2] == calling
    history.add(SAID)
    history.ask("And doubled?")
    assert [(one.role, one.content, one.reasoning, len(one.calls)) for one in history.messages] == [
        ("system", "Be brief.", None, 0),
        ("user", "6 * 7?", None, 0),
        ("assistant", "", None, 1),
        ("tool", "42", None, 0),
        ("assistant", "42", None, 0),
        ("user", "And doubled?", None, 0),
    ]
    assert not history.answered
    history.take_back()
    assert history.answered
    assert len(history.messages) == 5
    history.start_again()
    assert len(history.messages) == 1


def test_the_oldest_exchanges_are_forgotten_where_the_context_ends() -> None:
    rendering, history = Rendering(chat_format(Tokenizer.train(["a"], 300), "text")), History()
    for number in range(3):
        history.ask(f"question {number}")
        history.add(ChatMessage("assistant", "ok"))
    history.ask("question 3")
    prompt, forgotten = rendering.fitting(history, 40, 10)
    assert forgotten == 2
    assert prompt == rendering.prompt_ids(history.messages)
    assert [one.content for one in history.messages] == ["question 2", "ok", "question 3"]
    history.start_again()
    history.ask("x" * 50)
    with pytest.raises(UserError, match="51 tokens are more than the context of 40"):
        rendering.fitting(history, 40, 10)


def test_a_tokenizer_without_a_template_talks_in_plain_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, None, ("<|endoftext|>",)))
    assert chat_format(tokenizer).name == "text"
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 60})
    save_model(Transformer(config).initialize(0), tmp_path)
    with pytest.raises(UserError, match='format = "chat": the tokenizer has no chat template'):
        chat(tmp_path, 0.0, 3, 0, form="chat")


def says(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, turns: Sequence[str], *questions: str) -> list[Request]:
    """Has the model say these turns, and the user ask these questions; returns the requests."""
    asked: list[Request] = []

    async def stream(self: NativeEngine, request: Request) -> AsyncIterator[list[Delta]]:
        asked.append(request)
        for token_id in ChatTemplate(tokenizer).completion_ids(turns[len(asked) - 1]):
            yield [Delta(token_id, 0.0, None)]

    monkeypatch.setattr(NativeEngine, "stream", stream)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{one}\n" for one in questions)))
    return asked


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_chat_talks_to_models_with_a_template(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = qwen(tmp_path) if family == "qwen" else llama(tmp_path)
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 400})
    save_model(Transformer(config).initialize(0), tmp_path)
    said = ["<think>\nhm\n</think>\n\n42", "84"]
    asked = says(monkeypatch, tokenizer, said, "6 * 7?", "And doubled?")
    chat(tmp_path, 0.0, 50, 0, system="Be brief.")
    assert capsys.readouterr().out == "[reasoning] hm\n42\n84\n"
    messages = [
        Message("system", "Be brief."),
        Message("user", "6 * 7?"),
        Message("assistant", "42"),
        Message("user", "And doubled?"),
    ]
    assert list(asked[1].prompt_ids) == ChatTemplate(tokenizer).prompt_ids(messages)
    assert asked[1].sampling.stop_ids == ChatTemplate(tokenizer).stop_ids


BRIEF = """
[environment]
env_id = "sums"
task = "arithmetic"
system = "Be brief."
reasoning_effort = "low"
chat_template_kwargs = { enable_thinking = false }
tools = { use = ["python"] }
"""


def a_run(directory: Path, template: str, settings: str = BRIEF) -> Tokenizer:
    step = directory / "checkpoints" / "step_000001"
    tokenizer = qwen(step, template)
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 2000})
    save_model(Transformer(config).initialize(0), step)
    (directory / "config.toml").write_text(settings)
    return tokenizer


def test_a_run_is_asked_as_its_environment_asked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = "<|im_start|>assistant\\n' }}"
    thinks = opening + "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    effort = "{{ '<|im_start|>system\\nEffort: ' + reasoning_effort|default('medium') + '<|im_end|>\\n' }}"
    template = effort + QWEN.replace(f"{opening}{{%- endif %}}", f"{thinks}{{%- endif %}}")
    tokenizer = a_run(tmp_path, template, BRIEF.replace('tools = { use = ["python"] }\n', ""))
    asked = says(monkeypatch, tokenizer, ["42", "42"], "6 * 7?")

    async def generate(self: NativeEngine, request: Request) -> list[Sample]:
        asked.append(request)
        return []

    monkeypatch.setattr(NativeEngine, "generate", generate)
    chat(tmp_path, 0.0, 50, 0)
    step = tmp_path / "checkpoints" / "step_000001"
    nmoe.generate(step, [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]])
    prompts = [tokenizer.decode(list(request.prompt_ids)) for request in asked]
    assert (
        prompts
        == [
            "<|im_start|>system\nEffort: low<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ]
        * 2
    )
    asked = says(monkeypatch, tokenizer, ["42"], "6 * 7?")
    chat(tmp_path, 0.0, 50, 0, form="chat")
    assert tokenizer.decode(list(asked[-1].prompt_ids)) == (
        "<|im_start|>system\nEffort: medium<|im_end|>\n<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert capsys.readouterr().out == "42\n42\n"


TOOLS = """
[environment]
env_id = "sums"
task = "arithmetic"
tools = { use = ["shout"] }
"""
CALLS = """
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
"""
_END = "        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\""
CALLING = QWEN.replace(_END, CALLS + _END)
assert CALLS in CALLING


def test_the_tools_of_a_runs_environment_answer_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_tools.py").write_text('def shout(text: str) -> str:\n    """Shouts."""\n    return text.upper()\n')
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = a_run(tmp_path, CALLING, TOOLS.replace("shout", "own_tools:shout"))
    call = '<tool_call>\n{"name": "shout", "arguments": {"text": "hi"}}\n</tool_call>'
    unknown = '<tool_call>\n{"name": "whisper", "arguments": {}}\n</tool_call>'
    asked = says(
        monkeypatch, tokenizer, [f"<think>\nso\n</think>\n\n{call}", unknown, "HI", "again"], "Shout hi", "Bye"
    )
    chat(tmp_path, 0.0, 200, 0)
    assert capsys.readouterr().out == (
        '[reasoning] so\n[shout] {"text": "hi"}\n[shout answers] HI\n[whisper] {}\n'
        "[whisper answers] error (unknown_tool): there is no tool 'whisper'; there are shout\nHI\nagain\n"
    )
    prompts = [tokenizer.decode(list(request.prompt_ids)) for request in asked]
    assert '"name": "shout"' in prompts[0]
    assert prompts[1].endswith(
        f"<think>\nso\n</think>\n\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\nHI\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "HI\n</tool_response>" in prompts[3]
    assert "so\n</think>" not in prompts[3]
    assert [request.sampling.seed for request in asked] == [0, 0, 0, 1]


def test_without_a_sandbox_a_chat_goes_on_without_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = TOOLS.replace("shout", "python") + '[sandbox]\nlevel = "landlock"\nwarm = 2\n'
    tokenizer = a_run(tmp_path, CALLING, settings)

    def missing(settings: SandboxSettings, limits: Limits) -> None:
        assert (settings.level, settings.warm) == ("landlock", 0)
        raise SandboxSetupError("no bubblewrap")

    monkeypatch.setattr(command, "Sandboxes", missing)
    asked = says(monkeypatch, tokenizer, ["42"])
    monkeypatch.setattr(sys, "stdin", Keys("hi\n"))
    chat(tmp_path, 0.0, 50, 0)
    out = capsys.readouterr().out
    assert "the tools of the training (python) are not offered here: no bubblewrap" in out.splitlines()
    assert "# Tools" not in tokenizer.decode(list(asked[0].prompt_ids))


def test_chat_runs_the_model_and_says_where_an_answer_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, QWEN, QWEN_CONTROLS, QWEN_TAGS))
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 60})
    save_model(Transformer(config).initialize(0), tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    chat(tmp_path, 0.0, 3, 0)
    out = capsys.readouterr().out
    assert out.endswith("\n(cut off: the answer is incomplete)\n")
    assert len(out.splitlines()) >= 2


PIECES = (Piece("reasoning", "h\x1b[2Jm"), Piece("content", "a\x1b[2Jb"), Piece("call", "", 0, "ad\x1bd"))


def test_a_terminal_dims_reasoning_and_is_shown_control_characters_as_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(terminal: bool) -> str:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        screen = Screen()
        for piece in PIECES:
            screen.show(piece)
        screen.show_tool("add", "4\n")
        screen.end()
        return capsys.readouterr().out

    assert told(True) == "\x1b[2mh\\x1b[2Jm\x1b[0m\na\\x1b[2Jb\n[ad\\x1bd] \n\x1b[2m4\x1b[0m\n\n"
    assert told(False) == "[reasoning] h\x1b[2Jm\na\x1b[2Jb\n[ad\x1bd] \n[add answers] 4\n\n"


def test_an_answer_is_put_together_from_its_pieces() -> None:
    answer = Answer("0/")
    for piece in (
        *(Piece("reasoning", "h"), Piece("reasoning", "m"), Piece("content", "a"), Piece("call", "", 0, "add")),
        *(Piece("arguments", '{"x"', 0), Piece("arguments", ": 1}", 0), Piece("call", "", 1, "now")),
    ):
        answer.add(piece)
    calls = (FunctionCall("add", '{"x": 1}', "0/0"), FunctionCall("now", "{}", "0/1"))
    assert answer.message() == ChatMessage("assistant", "a", "hm", calls)


class Keys(io.StringIO):
    """A terminal whose user types these lines; None is Ctrl-C."""

    def __init__(self, *lines: str | None) -> None:
        super().__init__()
        self._lines = list(lines)

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        if not self._lines:
            return ""
        if (line := self._lines.pop(0)) is None:
            raise KeyboardInterrupt
        return line


def test_ctrl_c_at_the_prompt_leaves_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, QWEN, QWEN_CONTROLS, QWEN_TAGS))
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 60})
    save_model(Transformer(config).initialize(0), tmp_path)
    keys = Keys(None, "/new\n", None, None, "never read\n")
    monkeypatch.setattr(sys, "stdin", keys)
    chat(tmp_path, 0.0, 3, 0)
    told = "(Ctrl-D leaves, and so does another Ctrl-C)"
    assert capsys.readouterr().out.splitlines()[1:] == ["> ", told, "> > ", told, "> "]
    assert keys.readline() == "never read\n"
