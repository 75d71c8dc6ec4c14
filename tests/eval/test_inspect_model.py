"""The provider for inspect-ai: what its tasks get is what `nmoe.generate` gives for the same conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat_templates
import pytest
from tiny_models import DENSE

from nmoe.errors import UserError
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer

QUESTIONS = [f"what is {n}" * (1 + n % 3) for n in range(9)]


@pytest.mark.extras
def test_a_task_samples_what_generate_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect_ai: Any = pytest.importorskip("inspect_ai", reason="the extra inspect is not installed")
    from inspect_ai.dataset import MemoryDataset  # type: ignore[import-not-found]
    from inspect_ai.dataset import Sample as Item
    from inspect_ai.model import get_model  # type: ignore[import-not-found]
    from inspect_ai.scorer import match  # type: ignore[import-not-found]
    from inspect_ai.solver import generate, system_message  # type: ignore[import-not-found]

    import nmoe.eval.inspect_model

    monkeypatch.chdir(tmp_path)
    tokenizer = chat_templates.qwen(tmp_path / "tokenizer")
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 256})
    (tmp_path / "base").mkdir()
    save_model(Transformer(config).initialize(3), tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    prompts = [[{"role": "system", "content": "Be short."}, {"role": "user", "content": one}] for one in QUESTIONS]
    expected = [one.text for [one] in nmoe.generate("base", prompts, max_new_tokens=12, temperature=0.0)]
    assert len(set(expected)) == len(QUESTIONS)
    items = MemoryDataset([Item(input=one, target="do") for one in QUESTIONS])
    task = inspect_ai.Task(items, solver=[system_message("Be short."), generate()], scorer=match())

    def sampled(**settings: Any) -> list[str]:
        model = get_model("nmoe/base", device="cpu", memoize=False)
        (log,) = inspect_ai.eval(task, model=model, log_dir="logs", display="none", max_tokens=12, **settings)
        assert log.status == "success", log.error
        ordered = sorted(log.samples, key=lambda one: (one.id, one.epoch))
        return [one.output.message.text for one in ordered]

    assert sampled(temperature=0.0) == expected
    drawn = sampled(temperature=1.0, epochs=2, seed=7)
    assert len(set(drawn)) > len(QUESTIONS), "the epochs of a problem differ"
    assert sorted(sampled(temperature=1.0, epochs=2, seed=7)) == sorted(drawn) != sorted(sampled(epochs=2, seed=8))
    with pytest.raises(UserError, match="stop_seqs: not followed by the provider nmoe"):
        inspect_ai.eval(
            task,
            model=get_model("nmoe/base", device="cpu"),
            log_dir="logs",
            display="none",
            stop_seqs=["e"],
            debug_errors=True,
        )
