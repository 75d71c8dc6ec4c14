"""Multiple choice by likelihood against transformers, one sequence at a time, and against lm-evaluation-harness itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import DENSE

from nmoe.cli.evaluate import evaluate
from nmoe.errors import UserError
from nmoe.eval.choices import choices_command
from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.text.tokenizer import Tokenizer

WORDS = ["the", "answer", "is", "what", "which", "of", "these", "does", "not", "world", "facts", "river"]
Record = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights in the form of Hugging Face."""
    directory = tmp_path_factory.mktemp("choices")
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 3, 340)
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 512})
    export_model(Transformer(config).initialize(3), directory)
    tokenizer.save(directory)
    return directory


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Record]]:
    """MMLU and ARC in the hub's form, in local copies: options of one to five words, and ARC's labels, which may be digits."""
    rng = random.Random(0)

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, most)))

    mmlu, arc = [], []
    for number in range(24):
        question, options, gold = (
            f"{words(9)} {number}?",
            [f"{words(6)} {place}" for place in range(4)],
            rng.randrange(4),
        )
        subject = ("world_facts", "anatomy")[number % 2]
        mmlu.append({"question": question, "subject": subject, "choices": options, "answer": gold})
        labels = list("1234" if number % 3 else "ABCD")
        given = {"text": options, "label": labels}
        arc.append({"id": f"{number}", "question": question, "choices": given, "answerKey": labels[gold]})
    kept = {"cais/mmlu/all": mmlu, "allenai/ai2_arc/ARC-Easy": arc}
    for name, rows in kept.items():
        (tmp_path / "kept" / name).mkdir(parents=True)
        (tmp_path / "kept" / name / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "kept"))
    return {"mmlu": mmlu, "arc_easy": arc}


def chosen(checkpoint: Path, prompts: Sequence[tuple[str, list[str]]]) -> list[tuple[int, int]]:
    """By the sum of the log-probabilities of each answer's tokens, and by that sum for each character of the answer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    found = []
    for prompt, answers in prompts:
        before, sums = len(tokenizer(prompt)["input_ids"]), []
        for answer in answers:
            ids = tokenizer(f"{prompt} {answer}")["input_ids"]
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(logprobs[place - 1, ids[place]].item() for place in range(before, len(ids))))
        by_length = [one / len(answer) for one, answer in zip(sums, answers, strict=True)]
        found.append((sums.index(max(sums)), by_length.index(max(by_length))))
    return found


def results(file: Path) -> dict[tuple[str, str], tuple[float, int]]:
    """Value and problems by mode and dataset."""
    found = {}
    for row in json.loads(file.read_text())["results"]:
        for one in row["evaluations"]:
            found[one["mode"], one["dataset"]] = one["value"], one["problems"]
    return found


def test_each_form_chooses_what_transformers_finds_most_likely(
    checkpoint: Path, records: dict[str, list[Record]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_text = chosen(
        checkpoint, [(f"Question: {one['question']}\nAnswer:", one["choices"]["text"]) for one in records["arc_easy"]]
    )
    golds = [one["answer"] for one in records["mmlu"]]
    share = {n: sum(each[n] == gold for each, gold in zip(by_text, golds, strict=True)) / 24 for n in (0, 1)}
    assert share[0] != share[1], "the two figures would pass for one another"
    # documented: nmoe eval runs/base runs/sft arc_easy arc_challenge --mode likelihood_text --out arc.json
    evaluate([checkpoint, Path("arc_easy")], mode="likelihood_text", device="cpu", out=tmp_path / "text.json")
    found = results(tmp_path / "text.json")
    assert found == {
        ("likelihood_text", "arc_easy"): (share[0], 24),
        ("likelihood_text_norm", "arc_easy"): (share[1], 24),
    }
    assert "likelihood_text_norm with 95% intervals" in capsys.readouterr().out

    letters = []
    for one in records["mmlu"]:
        head = f"The following are multiple choice questions (with answers) about {one['subject'].replace('_', ' ')}."
        options = "".join(f"{letter}. {text}\n" for letter, text in zip("ABCD", one["choices"], strict=True))
        letters.append((f"{head}\n\n{one['question']}\n{options}Answer:", list("ABCD")))
    right = [each[0] == gold for each, gold in zip(chosen(checkpoint, letters), golds, strict=True)]
    # documented: nmoe eval runs/base mmlu --mode likelihood_letter
    evaluate([checkpoint, Path("mmlu")], mode="likelihood_letter", device="cpu", out=tmp_path / "letter.json")
    found = results(tmp_path / "letter.json")
    assert found["likelihood_letter", "mmlu"] == (sum(right) / 24, 24)
    assert found["likelihood_letter", "mmlu/subject=anatomy"] == (sum(right[1::2]) / 12, 12)


def test_several_models_have_paired_tests_and_only_multiple_choice_is_taken(
    checkpoint: Path, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in checkpoint.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    choices_command([checkpoint, other, Path("mmlu")], "likelihood_letter", 9, "cpu", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    (compared,) = written["comparisons"]
    assert (compared["problems"], compared["difference"], compared["p_value"]) == (9, 0.0, 1.0)
    with pytest.raises(UserError, match="sort: likelihood_text is of multiple choice, not of problems of type sort"):
        choices_command([checkpoint, Path("sort")], "likelihood_text", 5, "cpu")
    with pytest.raises(UserError, match="likelihood_text samples nothing; leave out the settings of sampling"):
        evaluate([checkpoint, Path("mmlu")], mode="likelihood_text", samples=8)


@pytest.mark.extras
def test_the_figures_are_those_of_lm_evaluation_harness(
    checkpoint: Path, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    """Its own definitions of ARC and MMLU, copied but for the place of the data."""
    lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    kept = {"arc_easy": "allenai/ai2_arc/ARC-Easy", "mmlu": "cais/mmlu/all"}
    definitions = {
        "arc_easy": 'doc_to_text: "Question: {{question}}\\nAnswer:"\ndoc_to_target: "{{choices.label.index(answerKey)}}"\n'
        'doc_to_choice: "{{choices.text}}"\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n',
        "mmlu": 'description: "The following are multiple choice questions (with answers) about anatomy.\\n\\n"\n'
        'doc_to_text: "{{question.strip()}}\\nA. {{choices[0]}}\\nB. {{choices[1]}}\\nC. {{choices[2]}}\\nD. {{choices[3]}}\\n'
        'Answer:"\n'
        'doc_to_choice: ["A", "B", "C", "D"]\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n',
    }
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, text in definitions.items():
        file = tmp_path / "kept" / kept[name] / "test.jsonl"
        if name == "mmlu":  # one subject is one task there
            file.write_text("".join(json.dumps(row | {"subject": "anatomy"}) + "\n" for row in records[name]))
        head = f"task: own_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
        (tasks / f"{name}.yaml").write_text(f"{head}output_type: multiple_choice\n{text}")
    theirs = lm_eval.simple_evaluate(
        HFLM(str(checkpoint), device="cpu", dtype="float32"),
        tasks=["own_arc_easy", "own_mmlu"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )["results"]
    choices_command([checkpoint, Path("arc_easy")], "likelihood_text", None, "cpu", tmp_path / "text.json")
    choices_command([checkpoint, Path("mmlu")], "likelihood_letter", None, "cpu", tmp_path / "letter.json")
    ours = results(tmp_path / "text.json") | results(tmp_path / "letter.json")
    assert ours["likelihood_text", "arc_easy"][0] == pytest.approx(theirs["own_arc_easy"]["acc,none"])
    assert ours["likelihood_text_norm", "arc_easy"][0] == pytest.approx(theirs["own_arc_easy"]["acc_norm,none"])
    assert ours["likelihood_letter", "mmlu"][0] == pytest.approx(theirs["own_mmlu"]["acc,none"])
