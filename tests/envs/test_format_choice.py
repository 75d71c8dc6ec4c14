"""The format of an environment: the tokenizer's own where nothing is said, each with a system message that fits it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chat_templates import gemma, llama, qwen, save

from nmoe.config.loader import load_environment
from nmoe.config.packaged import ENVIRONMENTS
from nmoe.config.tables.pools import task_types
from nmoe.envs.check import check_environment
from nmoe.envs.environment import Environment, in_format
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.plain import PlainTask
from nmoe.errors import UserError, shown
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.tokenizer import Tokenizer

SETTINGS = """
env_id = "demo"
system = "Sort."
[task_pool]
type = "generated"
task_type = "sort"
[system_by_format]
chat = "Sort, and say no more."
"""


@pytest.fixture(scope="module")
def harmony() -> Tokenizer:
    return Tokenizer.train(["a"], 300)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "environment.toml"
    path.write_text(SETTINGS)
    return path


def test_the_tokenizer_decides_where_nothing_is_said(file: Path, harmony: Tokenizer, chat: Tokenizer) -> None:
    prompts = {}
    for tokenizer in (harmony, chat):
        environment = Environment.from_toml(file, tokenizer)
        problem = environment.pool.order.at(0)
        prompts[environment.settings.format] = tokenizer.decode(environment.prompts.ids(problem)).replace(
            problem.question, "QUESTION"
        )
    assert prompts == {
        "harmony": "<|start|>system<|message|>Sort.<|end|><|start|>user<|message|>QUESTION<|end|><|start|>assistant",
        "chat": "<|im_start|>system\nSort, and say no more.<|im_end|>\n<|im_start|>user\nQUESTION<|im_end|>\n"
        "<|im_start|>assistant\n",
    }


def test_what_is_chosen_stays_chosen(file: Path, chat: Tokenizer) -> None:
    """What an environment records, for replays and checkpoints, no longer asks the tokenizer."""
    environment = Environment.from_toml(file, chat)
    assert environment.settings == in_format(environment.settings, chat)
    assert environment.held_out().settings.system == "Sort, and say no more."


def test_a_tokenizer_for_no_conversation(file: Path, tmp_path: Path) -> None:
    plain = Tokenizer.load(save(tmp_path / "plain", None, ("<|endoftext|>",)))
    with pytest.raises(
        UserError, match="neither Harmony's control tokens nor a chat template; use another one, or write"
    ):
        Environment.from_toml(file, plain)
    file.write_text('format = "boxed"\n' + SETTINGS)
    assert Environment.from_toml(file, plain).settings.system == "Sort."


def test_harmony_asked_of_a_chat_model_names_the_other_format(file: Path, chat: Tokenizer) -> None:
    file.write_text('format = "harmony"\n' + SETTINGS)
    with pytest.raises(UserError, match='it has a chat template: write format = "chat", or leave `format` out'):
        Environment.from_toml(file, chat)


@pytest.mark.parametrize("path", sorted(ENVIRONMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_packaged_system_messages_fit_their_format(path: Path, harmony: Tokenizer, chat: Tokenizer) -> None:
    """Harmony's has no box (docs/requirements.md), and a chat model has never heard of channels."""
    settings = load_environment(path)
    if settings.format == "auto":
        assert "boxed" not in in_format(settings, harmony).system
        system = in_format(settings, chat).system
        # A plain question asks for its form itself, and files that the policy leaves have none.
        plain = any(isinstance(TASKS[name], PlainTask) for name in task_types(settings.task_pool))
        files = settings.tools is not None and bool(settings.tools.write)
        assert files or "final channel" in in_format(settings, harmony).system
        assert system == "" if plain else files or system.startswith("Reason step by step")
        assert "channel" not in system
    else:
        assert settings.system == ""
    if settings.format == "harmony":
        others = ("five_stages", "guess", "harmony_shown", "harmony_zero", "skills", "skills_longer", "sort", "tools")
        assert settings.env_id in others


def test_the_best_answer_in_harmony_is_the_answer_alone(harmony: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"problem": "Halve 1.", "answer": "\\\\frac{1}{2}"}\n')
    (tmp_path / "environment.toml").write_text(
        'env_id = "halves"\n[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "math"\n'
    )
    environment = Environment.from_toml(tmp_path / "environment.toml", harmony)
    problem = environment.pool.order.at(0)
    said = harmony.decode(environment.grader.answer_ids(problem, problem.gold))
    assert said.endswith("<|channel|>final<|message|>\\frac{1}{2}<|return|>")


@pytest.mark.parametrize(
    ("template", "rubric", "right"),
    [
        (llama, "", "865<|eot_id|>"),
        (
            llama,
            "[rubric]\ncorrectness = 1.0\nreasoning = 0.5\n",
            "<think>\nThe answer follows.\n</think>\n\n865<|eot_id|>",
        ),
        (qwen, "", "<think>\nThe answer follows.\n</think>\n\n865<|im_end|>"),
    ],
)
def test_the_right_answer_reasons_where_the_template_or_the_reward_knows_of_reasoning(
    template: Callable[[Path], Tokenizer], rubric: str, right: str, tmp_path: Path
) -> None:
    tokenizer = template(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"question": "Which is larger, 865 or 518?", "answer": "865"}\n')
    pool = '[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "gsm8k"\n'
    (tmp_path / "environment.toml").write_text(f'env_id = "larger"\nformat = "chat"\n{pool}{rubric}')
    environment = Environment.from_toml(tmp_path / "environment.toml", tokenizer)
    ids = environment.grader.answer_ids(environment.pool.order.at(0), "865")
    assert tokenizer.decode(ids) == right
    assert environment.grader.answer_text(ids) == "865"


CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_system_message_that_the_template_adds_is_named_and_replaced(tmp_path: Path, file: Path) -> None:
    tokenizer = qwen(tmp_path / "smol", CHATML)
    file.write_text(SETTINGS.replace('system = "Sort."\n', "").replace('chat = "Sort, and say no more."\n', ""))
    environment = Environment.from_toml(file, tokenizer)
    assert environment.renderer.default_system == "You are SmolLM."
    prompt = tokenizer.decode(environment.prompts.ids(environment.pool.order.at(0)))
    assert prompt.startswith("<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\n")
    said = f"system       the template has a default, {shown('You are SmolLM.')}: "
    assert f"{said}set `system` to replace it" in list(check_environment(file, tmp_path / "smol"))
    file.write_text(SETTINGS)
    environment = Environment.from_toml(file, tokenizer)
    prompt = tokenizer.decode(environment.prompts.ids(environment.pool.order.at(0)))
    assert prompt.startswith("<|im_start|>system\nSort, and say no more.<|im_end|>\n<|im_start|>user\n")
    assert f"{said}which the environment's `system` replaces" in list(check_environment(file, tmp_path / "smol"))


def test_templates_without_a_system_message_of_their_own(tmp_path: Path, harmony: Tokenizer, file: Path) -> None:
    for directory, make in (("qwen", qwen), ("llama", llama), ("gemma", gemma)):
        (tmp_path / directory).mkdir()
        tokenizer = make(tmp_path / directory)
        assert ChatTemplate(tokenizer).default_system == "", directory
    assert Environment.from_toml(file, harmony).renderer.default_system == ""
