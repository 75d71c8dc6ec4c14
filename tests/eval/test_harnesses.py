"""Adapters for lm-evaluation-harness and inspect-ai against what the harnesses' own models and `nmoe.generate` give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from tiny_models import DENSE

from nmoe.errors import UserError
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.runs.conversions import export_checkpoint
from nmoe.text.tokenizer import Tokenizer

TASK = """
task: own_{name}
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


@pytest.fixture
def lm_eval() -> Any:
    return pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")


def save(tokenizer: Tokenizer, context_tokens: int, directory: Path) -> tuple[Path, Path]:
    """A checkpoint as a run leaves it, and as `nmoe export` writes it."""
    saved, exported = directory / "saved", directory / "exported"
    saved.mkdir()
    shape = DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": context_tokens}
    save_model(Transformer(ModelConfig(**shape)).initialize(3), saved)
    tokenizer.save(saved)
    export_checkpoint(saved, exported)
    return saved, exported


def write(tasks: Path, name: str, kind: str, text: str, rest: str) -> None:
    """The task `own_NAME` over nine questions, of which the last are longer than a context of 64 tokens."""
    tasks.mkdir(exist_ok=True)
    rows = [
        {
            "question": f"what is {n}" * (1 + n),
            "options": [f" {n}", f" not {n}x", " the"],
            "gold": n % 3,
            "answer": "do",
        }
        for n in range(9)
    ]
    data = tasks / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, text=text, rest=rest))


def evaluated(lm_eval: Any, model: Any, tasks: Path, **settings: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names = [f"own_{file.stem}" for file in sorted(tasks.glob("*.yaml"))]
    return dict(lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0, **settings))


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, samples in theirs["samples"].items():
        for one, other in zip(ours["samples"][name], samples, strict=True):
            assert one["arguments"] == other["arguments"], name
            for (a,), (b,) in zip(one["resps"], other["resps"], strict=True):
                assert a == (b if isinstance(b, str) else pytest.approx(b, rel=1e-4, abs=1e-4)), name
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4), (name, metric)


@pytest.mark.extras
def test_its_numbers_are_those_of_the_exported_checkpoint(tmp_path: Path, lm_eval: Any) -> None:
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    from nmoe.eval.lm_eval_model import NmoeLM

    tokenizer = Tokenizer.train(["the answer is what question which of these does not do"] * 3, 320)
    (saved, exported), tasks = save(tokenizer, 64, tmp_path), tmp_path / "tasks"
    write(tasks, "multiple_choice", "multiple_choice", "{{question}}", CHOICE)
    write(tasks, "generate_until", "generate_until", "{{question}}", UNTIL)
    write(tasks, "loglikelihood_rolling", "loglikelihood_rolling", "", ROLLING)
    ours = evaluated(lm_eval, NmoeLM(saved, "cpu"), tasks)
    assert_same(ours, evaluated(lm_eval, HFLM(str(exported), device="cpu", dtype="float32"), tasks))


@pytest.mark.extras
def test_conversations_are_rendered_by_the_tokenizers_template(tmp_path: Path, lm_eval: Any) -> None:
    """With a system message and examples as turns."""
    from lm_eval.models.huggingface import HFLM

    from nmoe.eval.lm_eval_model import NmoeLM

    tokenizer = chat_templates.qwen(tmp_path / "tokenizer")
    (saved, exported), tasks = save(tokenizer, 512, tmp_path), tmp_path / "tasks"
    shots = "fewshot_split: test\nfewshot_config: {sampler: first_n}\nnum_fewshot: 2\n"
    write(tasks, "multiple_choice", "multiple_choice", "{{question}}", CHOICE)
    # "7" is in no control token: the other model would stop at one whose name has an "e".
    write(tasks, "generate_until", "generate_until", "{{question}}", UNTIL.replace('"e"', '"7"') + shots)
    settings = {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "Be short."}
    ours = evaluated(lm_eval, NmoeLM(saved, "cpu"), tasks, **settings)
    assert_same(ours, evaluated(lm_eval, HFLM(str(exported), device="cpu", dtype="float32"), tasks, **settings))
    asked = ours["samples"]["own_generate_until"][0]["arguments"][0][0]
    assert asked.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n")
    assert asked.count("<|im_start|>assistant") == 3


@pytest.mark.extras
def test_sampling_settings_are_followed_or_refused(tmp_path: Path, lm_eval: Any) -> None:
    """The likeliest of one candidate is what greedy decoding takes, in both; draws are those of their seed."""
    from lm_eval.models.huggingface import HFLM

    from nmoe.eval.lm_eval_model import NmoeLM

    tokenizer = Tokenizer.train(["the answer is what question which of these does not do"] * 3, 320)
    (saved, exported), tasks = save(tokenizer, 256, tmp_path), tmp_path / "tasks"
    write(tasks, "generate_until", "generate_until", "{{question}}", UNTIL)
    model = NmoeLM(saved, "cpu")

    def drawn(**settings: Any) -> list[str]:
        # `until` is replaced, too: texts of twelve tokens are hardly ever alike by accident.
        found = evaluated(lm_eval, model, tasks, gen_kwargs={"until": [], "max_gen_toks": 12} | settings)
        return [sample["resps"][0][0] for sample in found["samples"]["own_generate_until"]]

    one_candidate = {"do_sample": True, "temperature": 1.5, "top_k": 1}
    hf = HFLM(str(exported), device="cpu", dtype="float32")
    assert_same(
        evaluated(lm_eval, model, tasks, gen_kwargs=one_candidate),
        evaluated(lm_eval, hf, tasks, gen_kwargs=one_candidate),
    )
    greedy, warm = drawn(do_sample=False), drawn(do_sample=True, temperature=1.5)
    assert drawn(do_sample=True, temperature=1.5, top_p=1e-6) == greedy == drawn(**one_candidate)
    assert warm == drawn(do_sample=True, temperature=1.5) != greedy
    with pytest.raises(UserError, match="num_beams: no setting of nmoe's sampling; known: do_sample, max_gen_toks"):
        drawn(num_beams=4)
    with pytest.raises(UserError, match="do_sample needs a temperature above 0"):
        drawn(do_sample=True)


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
