"""`nmoe chat`: what was said before is in the prompt, in the form that the model was made for."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chat_templates import QWEN, QWEN_CONTROLS, QWEN_TAGS, llama, qwen, save
from tiny_models import DENSE

import nmoe
from nmoe.engine.api import Delta, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import renderer_as_trained
from nmoe.errors import UserError
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.serve.chat import History, _TextPrinter, chat
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.harmony import Harmony
from nmoe.text.renderers import PlainRenderer
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from nmoe.types import Message, Sample, Sampling

THOUGHT = "<think>\nhm\n</think>\n\n"


def test_the_history_of_a_chat_template_is_what_was_said_without_the_reasoning(tmp_path: Path) -> None:
    tokenizer = qwen(tmp_path)
    talk = History(renderer_as_trained(None, tokenizer), "Be brief.", 4000)
    assert talk.ask("6 * 7?", 100) == (
        ChatTemplate(tokenizer).prompt_ids([Message("system", "Be brief."), Message("user", "6 * 7?")]),
        0,
    )
    talk.answered(ChatTemplate(tokenizer).completion_ids(f"{THOUGHT}42"))
    prompt, _ = talk.ask("And doubled?", 100)
    assert tokenizer.decode(prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n42<|im_end|>\n"
        "<|im_start|>user\nAnd doubled?<|im_end|>\n<|im_start|>assistant\n"
    )
    talk.start_again()
    assert "42" not in tokenizer.decode(talk.ask("And doubled?", 100)[0])


def test_harmony_and_plain_text_have_a_history_too() -> None:
    tokenizer = Tokenizer.train(["a"], 300)
    harmony = Harmony(tokenizer)
    talk = History(renderer_as_trained(None, tokenizer), "", 4000)
    talk.ask("1?", 100)
    talk.answered(
        harmony.render_completion(
            [Message("assistant", "hm", channel="analysis"), Message("assistant", "2", channel="final")]
        )
    )
    assert tokenizer.decode(talk.ask("3?", 100)[0]) == (
        "<|start|>user<|message|>1?<|end|><|start|>assistant<|channel|>final<|message|>2<|end|>"
        "<|start|>user<|message|>3?<|end|><|start|>assistant"
    )
    plain = History(PlainRenderer(tokenizer), "Count.", 4000)
    plain.ask("1?", 100)
    plain.answered(tokenizer.encode("2"))
    assert tokenizer.decode(plain.ask("3?", 100)[0]) == "Count.\n\n1?\n\n2\n\n3?\n"


def test_the_oldest_exchanges_are_forgotten_where_the_context_ends() -> None:
    tokenizer = Tokenizer.train(["a"], 300)
    talk = History(PlainRenderer(tokenizer), "", 40)
    for number in range(3):
        talk.ask(f"question {number}", 10)
        talk.answered(tokenizer.encode("ok"))
    prompt, forgotten = talk.ask("question 3", 10)
    assert forgotten == 1
    assert tokenizer.decode(prompt) == "question 2\n\nok\n\nquestion 3\n"
    with pytest.raises(UserError, match="51 tokens are more than the context of 40"):
        talk.ask("x" * 50, 10)


def test_a_tokenizer_without_a_template_talks_in_plain_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, None, ("<|endoftext|>",)))
    assert renderer_as_trained(None, tokenizer).name == "text"
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 60})
    save_model(Transformer(config).initialize(0), tmp_path)
    with pytest.raises(UserError, match='format = "chat": the tokenizer has no chat template'):
        chat(tmp_path, 0.0, 3, 0, form="chat")


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_chat_talks_to_models_with_a_template(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = qwen(tmp_path) if family == "qwen" else llama(tmp_path)
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 400})
    save_model(Transformer(config).initialize(0), tmp_path)
    asked: list[Request] = []
    said = ["<think>\nhm\n</think>\n\n42", "84"] if family == "qwen" else ["42", "84"]

    async def stream(self: NativeEngine, request: Request) -> AsyncIterator[list[Delta]]:
        asked.append(request)
        for token_id in ChatTemplate(tokenizer).completion_ids(said[len(asked) - 1]):
            yield [Delta(token_id, 0.0, None)]

    monkeypatch.setattr(NativeEngine, "stream", stream)
    monkeypatch.setattr(sys, "stdin", io.StringIO("6 * 7?\nAnd doubled?\n"))
    chat(tmp_path, 0.0, 50, 0, system="Be brief.")
    assert capsys.readouterr().out == "\n".join(said) + "\n"
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


def test_a_run_is_asked_as_its_environment_asked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = "<|im_start|>assistant\\n' }}"
    thinks = opening + "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    effort = "{{ '<|im_start|>system\\nEffort: ' + reasoning_effort|default('medium') + '<|im_end|>\\n' }}"
    step = tmp_path / "checkpoints" / "step_000001"
    tokenizer = qwen(step, effort + QWEN.replace(f"{opening}{{%- endif %}}", f"{thinks}{{%- endif %}}"))
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 400})
    save_model(Transformer(config).initialize(0), step)
    (tmp_path / "config.toml").write_text(BRIEF)
    asked: list[Request] = []

    async def stream(self: NativeEngine, request: Request) -> AsyncIterator[list[Delta]]:
        asked.append(request)
        for token_id in ChatTemplate(tokenizer).completion_ids("42"):
            yield [Delta(token_id, 0.0, None)]

    async def generate(self: NativeEngine, request: Request) -> list[Sample]:
        asked.append(request)
        return []

    monkeypatch.setattr(NativeEngine, "stream", stream)
    monkeypatch.setattr(NativeEngine, "generate", generate)
    monkeypatch.setattr(sys, "stdin", Keys("6 * 7?\n"))
    chat(tmp_path, 0.0, 50, 0)
    assert "the tools of the training (python) are not offered here" in capsys.readouterr().out.splitlines()
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
    monkeypatch.setattr(sys, "stdin", Keys("6 * 7?\n"))
    chat(tmp_path, 0.0, 50, 0, form="chat")
    assert tokenizer.decode(list(asked[-1].prompt_ids)) == (
        "<|im_start|>system\nEffort: medium<|im_end|>\n<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n"
    )


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


def test_a_terminal_is_shown_control_characters_as_escapes_and_a_pipe_gets_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY)
    ids = tokenizer.encode("a\x1b[2Jb\n")

    def told(terminal: bool) -> str:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        printer = _TextPrinter(tokenizer, Sampling(9))
        for token_id in ids:
            printer.feed(token_id)
        printer.end()
        return capsys.readouterr().out

    assert told(True).startswith("a\\x1b[2Jb\n\n")
    assert told(False).startswith("a\x1b[2Jb\n\n")


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
