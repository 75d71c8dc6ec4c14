"""The adapter for lm-evaluation-harness against the harness's own `hf` model on the exported checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import DENSE

from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.text.tokenizer import Tokenizer

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
{rest}
"""
CHOICE = 'doc_to_choice: "{{options}}"\ndoc_to_target: gold\nmetric_list: [{metric: acc}, {metric: acc_norm}]'
ROLLING = 'doc_to_target: "{{question}}"\nmetric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]'
UNTIL = 'doc_to_target: answer\ngeneration_kwargs: {until: ["e"], max_gen_toks: 12, do_sample: false}\n'


@pytest.mark.extras
def test_its_numbers_are_those_of_the_exported_checkpoint(tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    from nmoe.eval.lm_eval_model import NmoeLM

    checkpoint, tasks = tmp_path / "model", tmp_path / "tasks"
    checkpoint.mkdir()
    tasks.mkdir()
    tokenizer = Tokenizer.train(["the answer is what question which of these does not do"] * 3, 320)
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size})
    export_model(Transformer(config).initialize(3), checkpoint)
    tokenizer.save(checkpoint)
    # The last questions are longer than the context of 64 tokens.
    rows = [
        {
            "question": f"what is {n}" * (1 + n),
            "options": [f" {n}", f" not {n}x", " the"],
            "gold": n % 3,
            "answer": "do",
        }
        for n in range(9)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {"multiple_choice": ("{{question}}", CHOICE), "generate_until": ("{{question}}", UNTIL)}
    kinds["loglikelihood_rolling"] = ("", ROLLING)
    for kind, (text, rest) in kinds.items():
        (tasks / f"{kind}.yaml").write_text(TASK.format(name=f"own_{kind}", data=data, kind=kind, text=text, rest=rest))

    def evaluated(model: Any) -> dict[str, Any]:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        return dict(
            lm_eval.simple_evaluate(
                model, tasks=[f"own_{kind}" for kind in kinds], task_manager=manager, bootstrap_iters=0
            )
        )

    ours, theirs = evaluated(NmoeLM(checkpoint, "cpu")), evaluated(HFLM(str(checkpoint), device="cpu", dtype="float32"))
    for name, samples in theirs["samples"].items():
        for one, other in zip(ours["samples"][name], samples, strict=True):
            for (a,), (b,) in zip(one["resps"], other["resps"], strict=True):
                assert a == (b if isinstance(b, str) else pytest.approx(b, rel=1e-4, abs=1e-4)), name
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4), (name, metric)
