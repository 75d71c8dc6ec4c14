"""Every command of README.md and docs/ is executed by something: those that nothing else does and that are quick, here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_templates import qwen
from forked import Result
from tiny_models import DENSE

from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer

Nmoe = Callable[..., Result]
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from documented_commands import OWED, command, documented, executed  # noqa: E402


def test_every_documented_command_is_executed() -> None:
    """What is owed to .ci/long is named."""
    done = list(executed())
    missing = {one.text for one in documented() if not any(other.runs(one) for other in done)}
    assert missing <= OWED


@pytest.mark.parametrize(
    ("by", "text", "runs"),
    [
        (
            "nmoe sft sft --records.path=x --run.steps=3",
            "nmoe sft sft --records.path=FILE",
            True,
        ),
        ("nmoe sft sft", "nmoe sft sft --records.path=FILE", False),
        ("nmoe sft sums --records.path=x", "nmoe sft sft --records.path=x", False),
        ("nmoe selfplay selfplay --model.path=x", "nmoe selfplay selfplay", False),
        ("python -m nmoe.rl train tools", "nmoe rl train tools   # a comment", True),
        ("torchrun --nproc_per_node=2 -m nmoe.rl train tools", "nmoe rl train tools", True),
        ("torchrun --nproc_per_node=2 -m nmoe sft sft", "nmoe rl train sft", False),
        ("nmoe rl train x", "nmoe rl verifier x", False),
        ("./speedrun.sh --scratch --full", "nmoe speedrun --scratch --full", True),
        ("nmoe eval a b | check", "nmoe eval RUN ENVIRONMENT --seed 3", False),
    ],
)
def test_what_counts_as_executed(by: str, text: str, runs: bool) -> None:
    assert command(by, "ci").runs(command(text, "page")) == runs


# documented: python -m nmoe.config.reference
def test_the_reference_prints_the_page() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "nmoe.config.reference"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout == (ROOT / "docs/reference/configuration.md").read_text()


# documented: nmoe env gc [--dry-run]
def test_there_may_be_nothing_to_collect(nmoe: Nmoe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMOE_WORKSPACES", str(tmp_path / "workspaces"))
    for arguments in ((), ("--dry-run",)):
        result = nmoe("env", "gc", *arguments)
        assert (result.code, result.err) == (0, "")


# documented: nmoe chat models/Qwen3-0.6B --system "Answer in one sentence."
def test_chat_with_a_model_of_another_maker(nmoe: Nmoe, tmp_path: Path) -> None:
    tokenizer = qwen(tmp_path / "qwen")
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 400})
    save_model(Transformer(config).initialize(0), tmp_path / "qwen")
    arguments = ("--system", "Answer in one sentence.", "--max-new-tokens=3", "--temperature=0")
    result = nmoe("chat", "qwen", *arguments, stdin="hi\n")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("(cut off: the answer is incomplete)\n")
