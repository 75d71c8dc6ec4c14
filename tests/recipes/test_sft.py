"""Supervised fine-tuning: the losses of a loop written by hand, what is held out, the best checkpoint, and exact resumption."""

from __future__ import annotations

import json
import math
import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from chat_templates import QWEN_CONTROLS, QWEN_TAGS, save
from interrupted_runs import figures, interrupted_at
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from nmoe.config.commands import SFTConfig
from nmoe.config.loader import load_run
from nmoe.config.problems import ConfigError
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.examples import read_examples
from nmoe.data.packing import PackedStream
from nmoe.errors import UserError
from nmoe.learner.passes import batch_logprobs
from nmoe.model.checkpoint import export_model, load_model
from nmoe.recipes.setup import build_model
from nmoe.recipes.sft import example_batch, sft
from nmoe.runs.ledger import read_metrics
from nmoe.runs.provenance import read_provenance
from nmoe.text.harmony import Harmony
from nmoe.text.renderers import IGNORED, make_renderer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

CONFIG = """
[run]
name = "sft"
directory = "HERE/runs"
steps = 6
threads = 1

[model]
tokenizer = "TOKENIZER"

[model.shape]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
intermediate_size = 64
context_tokens = 64

[records]
path = "HERE/train.jsonl"
tokens_per_step = 200

[batch]
tokens_per_microbatch = 100

[optimizer]
learning_rate = 1e-2
warmup_steps = 2

[checkpoint]
every_steps = 3
"""


MARKED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def conversations(count: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    digits = ["".join(rng.choices("0123456789", k=rng.randint(2, 8))) for _ in range(count)]
    return [(f"Reverse: {text}", text[::-1]) for text in digits]


def record(asked: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


Configure = Callable[..., SFTConfig]


@pytest.fixture
def configure(workshop: Path, tmp_path: Path) -> Configure:
    """A configuration over train.jsonl of 60 conversations."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record(*one)) + "\n" for one in conversations(60)))
    text = CONFIG.replace("HERE", str(tmp_path)).replace("TOKENIZER", str(workshop / "tokenizer"))
    (tmp_path / "sft.toml").write_text(text)
    return lambda *overrides: load_run(tmp_path / "sft.toml", SFTConfig, overrides)


def test_the_loss_of_every_step_is_that_of_a_loop_written_by_hand(
    configure: Configure, workshop: Path, tmp_path: Path
) -> None:
    """With transformers' model of the same weights, torch's AdamW, and masks from where the prompt ends."""
    config = configure()
    run = sft(config)
    tokenizer = Tokenizer.load(workshop / "tokenizer")
    export_model(build_model(config.model, tokenizer, config.run.seed), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    rates = [
        1e-2 * share for share in (0.5, 1.0, *(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 3)) for i in range(4)))
    ]
    harmony = Harmony(tokenizer)
    sequences = []
    for asked, answer in conversations(60):
        prompt = harmony.render_prompt([Message("user", asked)])
        completion = harmony.render_completion([Message("assistant", answer, channel="final")])
        sequences.append((prompt + completion, [IGNORED] * len(prompt) + completion))
    stream = PackedStream([len(ids) - 1 for ids, _ in sequences], 200, 0, "")
    losses, utilisation = [], []
    for rate in rates:
        pack = [sequences[index] for index in stream.take()]
        learned = sum(label != IGNORED for _, labels in pack for label in labels)
        total = torch.zeros(())
        for ids, labels in pack:
            logits = model(torch.tensor([ids])).logits[0, :-1]
            total = total + cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=IGNORED, reduction="sum")
        loss = total / learned
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(float(loss.detach()))
        utilisation.append(sum(len(ids) - 1 for ids, _ in pack) / 200)
    rows = read_metrics(run)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.5  # it learns, so that the steps were worth comparing
    assert [row["packing_utilisation"] for row in rows] == pytest.approx(utilisation)


def test_by_a_chat_template_the_first_loss_is_that_of_transformers_ids_and_mask(
    configure: Configure, tmp_path: Path
) -> None:
    directory = save(tmp_path / "chat", MARKED, QWEN_CONTROLS, QWEN_TAGS)
    config = configure(f"--model.tokenizer={directory}", "--run.steps=1", "--optimizer.warmup_steps=0")
    config = config.model_copy(update={"records": config.records.model_copy(update={"tokens_per_step": 100_000})})
    run = sft(config)
    assert "rendered as chat" in (run / "log.txt").read_text()
    export_model(build_model(config.model, Tokenizer.load(directory), config.run.seed), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    template = AutoTokenizer.from_pretrained(directory).apply_chat_template
    total, learned = torch.zeros(()), 0
    for one in conversations(60):
        rendered = template(record(*one)["messages"], return_assistant_tokens_mask=True, return_dict=True)
        ids, mask = torch.tensor(rendered["input_ids"]), torch.tensor(rendered["assistant_masks"], dtype=torch.bool)
        with torch.no_grad():
            logits = model(ids.unsqueeze(0)).logits[0, :-1]
        total += cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum")
        learned += int(mask.sum())
    (row,) = read_metrics(run)
    assert row["learned_tokens"] == learned
    assert row["loss"] == pytest.approx(float(total / learned), abs=1e-5)


def test_an_adapter_is_trained_beside_a_base(configure: Configure, tmp_path: Path) -> None:
    base = sft(configure("--run.name=base"))
    shared = (f"--model.path={base}", "--lora.rank=4", "--run.steps=4", "--run.name=adapter")
    text = (tmp_path / "sft.toml").read_text()
    (tmp_path / "lora.toml").write_text(text[: text.index("[model]")] + text[text.index("[records]") :])
    run = sft(load_run(tmp_path / "lora.toml", SFTConfig, shared))
    checkpoint = run / "checkpoints" / "latest"
    assert (checkpoint / "adapter_config.json").exists()
    assert not (checkpoint / "model.safetensors").exists()
    rows = read_metrics(run)
    assert rows[-1]["loss"] < read_metrics(base)[0]["loss"]


def test_what_is_held_out_is_never_trained_on_and_its_loss_decides_the_best(
    configure: Configure, workshop: Path
) -> None:
    config = configure(
        "--records.held_out=0.2", "--eval.0.every_steps=2", "--optimizer.learning_rate=0.05", "--run.steps=12"
    )
    run = sft(config)
    rows = [row for row in read_metrics(run) if "held_out_loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    evaluations = [json.loads((run / "eval" / f"step_{row['step']:06}.json").read_text())["results"][0] for row in rows]
    assert [one["value"] for one in evaluations] == [row["held_out_loss"] for row in rows]
    assert all(one["low"] < one["value"] < one["high"] and one["problems"] == 12 for one in evaluations)
    start = json.loads((run / "eval" / "step_000000.json").read_text())["results"][0]
    assert "since_start" not in start
    for one in evaluations:
        weighed = [one["weights"][key] * loss for key, loss in one["outcomes"].items()]
        assert sum(weighed) / sum(one["weights"].values()) == pytest.approx(one["value"])
        assert one["since_start"]["difference"] == pytest.approx(one["value"] - start["value"], abs=1e-6)
        assert one["since_start"]["low"] < one["since_start"]["difference"] < one["since_start"]["high"]
    best = min(rows, key=lambda row: row["held_out_loss"])
    directory = run / "checkpoints" / "best"
    assert directory.resolve().name == f"step_{best['step']:06}"
    tokenizer = Tokenizer.load(workshop / "tokenizer")
    examples = read_examples(config.records, make_renderer(tokenizer), tokenizer, 64)
    trained, held_out = examples.split(0.2, config.run.seed)
    assert (trained.records, held_out.records) == (48, 12)
    both = [tuple(part[index].ids) for part in (trained, held_out) for index in range(len(part))]
    assert sorted(both) == sorted(tuple(examples[index].ids) for index in range(60))
    batch = example_batch([held_out[index] for index in range(12)])
    logprobs_N = batch_logprobs(load_model(directory), batch, 4096, 1.0)
    assert best["held_out_loss"] == pytest.approx(float(-logprobs_N.mean()), abs=1e-6)


def test_a_file_of_its_own_is_evaluated_on(configure: Configure, tmp_path: Path) -> None:
    dev = tmp_path / "dev.jsonl"
    dev.write_text(json.dumps({"prompt": "Reverse: 01", "completion": "10"}) + "\n")
    run = sft(configure(f"--records.held_out_path={dev}", "--eval.0.every_steps=3"))
    assert json.loads((run / "eval" / "step_000003.json").read_text())["results"][0]["dataset"] == str(dev)
    assert "held out: 1 records = 1 sequences" in (run / "log.txt").read_text()


def test_a_split_of_its_own_is_evaluated_on(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "both").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "both" / "train.jsonl")
    (tmp_path / "both" / "test.jsonl").write_text(json.dumps(record("Reverse: 01", "10")) + "\n")
    data = ("--records.path=" + str(tmp_path / "both"), "--records.split=train[:50]", "--records.held_out_split=test")
    run = sft(configure(*data, "--eval.0.every_steps=6"))
    log = (run / "log.txt").read_text()
    assert "50 records = 50 sequences" in log
    assert "held out: 1 records = 1 sequences" in log
    (result,) = json.loads((run / "eval" / "step_000006.json").read_text())["results"]
    assert result["dataset"] == f"{tmp_path / 'both'}, test"


def test_epochs_come_to_steps(configure: Configure, tmp_path: Path) -> None:
    run = sft(configure("--run.steps=0", "--records.epochs=1.5"))
    log = (run / "log.txt").read_text()
    examples = 60
    tokens = sum(row["tokens_in_batch"] for row in read_metrics(run))
    steps = read_metrics(run)[-1]["step"]
    (line,) = [line for line in log.splitlines() if "packing:" in line]
    packs = int(line.partition("sequences in ")[2].partition(" steps an epoch")[0])
    assert steps == math.ceil(1.5 * packs)
    assert f"packing: {examples} sequences in {packs} steps an epoch" in log
    assert tokens <= steps * 200
    short = sft(configure("--run.steps=0", "--records.epochs=0.1", "--run.name=short"))
    (row,) = read_metrics(short)  # shorter than its warm-up of two steps, whose last has the whole rate
    assert row["learning_rate"] == pytest.approx(1e-2)
    for overrides, message in (
        (["--records.epochs=2"], r"\[run\] steps = 6: excludes records\.epochs = 2; give one of the two"),
        (["--run.steps=0"], r"run\.steps=0: must be more than 0, unless records\.epochs is given"),
        (["--eval.0.every_steps=2"], "nothing to evaluate on; set records.held_out, held_out_path or held_out_split"),
        (["--records.held_out=0.1"], r"records are held out but never evaluated on; add \[\[eval\]\] with every_steps"),
        (
            ["--records.held_out=0.1", "--records.held_out_path=x", "--eval.0.every_steps=2"],
            "evaluate on one of the two",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            configure(*overrides)


def test_overlong_records_are_left_out_counted_and_logged(configure: Configure, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    long = record("Reverse: " + "1" * 80, "1" * 80)
    file.write_text(json.dumps(long) + "\n" + file.read_text() + json.dumps(long) + "\n")
    run = sft(configure("--run.steps=3"))
    log = (run / "log.txt").read_text()
    assert "62 records = 60 sequences of " in log
    assert f"left out, longer than the model's context: 2 sequences ({file}:1, {file}:62)" in log
    file.write_text(json.dumps(long) + "\n")
    with pytest.raises(
        UserError, match=r"train\.jsonl: no record with a token to train on; 1 are longer than its context"
    ):
        sft(configure("--run.name=none"))
    assert not (tmp_path / "runs" / "none").exists()


def test_a_run_that_was_interrupted_goes_on_number_for_number(configure: Configure, tmp_path: Path) -> None:
    """In its second epoch, whose packs are other ones."""
    options = ("--records.held_out=0.1", "--eval.0.every_steps=3", "--run.steps=10", "--records.tokens_per_step=300")
    whole = read_metrics(sft(configure(*options, "--run.name=whole")))

    with interrupted_at(5):
        sft(configure(*options, "--run.name=part"))
    part = sft(configure(*options, "--run.name=part", "--run.resume=true"))
    assert "resumed from step 5" in (part / "log.txt").read_text()
    assert figures(read_metrics(part)) == figures(whole)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record(f"Reverse: {i}", str(i))) + "\n" for i in range(9)))
    with pytest.raises(UserError, match=r"train\.jsonl: not the documents that this run began with"):
        sft(configure(*options, "--run.name=part", "--run.resume=true", "--run.steps=12"))


def test_a_resumption_that_the_checkpoint_refuses_leaves_the_run_as_it_was(
    configure: Configure, tmp_path: Path
) -> None:
    """The base has been replaced by one of another shape."""
    base = sft(configure("--run.name=base", "--run.steps=1"))
    text = (tmp_path / "sft.toml").read_text()
    (tmp_path / "on.toml").write_text(text[: text.index("[model]")] + text[text.index("[records]") :])
    options = (f"--model.path={base}", "--run.name=on")
    run = sft(load_run(tmp_path / "on.toml", SFTConfig, (*options, "--run.steps=1")))
    kept = {name: (run / name).read_bytes() for name in ("config.toml", "provenance.json", "metrics.jsonl")}
    base.rename(tmp_path / "first")
    sft(configure("--run.name=base", "--run.steps=1", "--model.shape.intermediate_size=32"))
    again = load_run(tmp_path / "on.toml", SFTConfig, (*options, "--run.steps=2", "--run.resume=true"))
    with pytest.raises(UserError, match=r"config\.json: of another model than the one to load into: .*intermediate"):
        sft(again)
    assert {name: (run / name).read_bytes() for name in kept} == kept

    shutil.rmtree(base)
    (tmp_path / "first").rename(base)
    sft(again)
    assert tomllib.loads((run / "config.toml").read_text())["run"]["steps"] == 2
    assert [one["from_step"] for one in read_provenance(run)["resumed"]] == [1]


@pytest.fixture
def mixed(configure: Configure, tmp_path: Path) -> Configure:
    """Conversations, MMLU's rows and GSM8K's as one mixture."""
    choice = {"question": "Which is even?", "choices": ["3", "4", "5"], "answer": 1, "subject": "arithmetic"}
    (tmp_path / "mmlu.jsonl").write_text(
        "".join(json.dumps(choice | {"question": f"{n}: which is even?"}) + "\n" for n in range(7))
    )
    (tmp_path / "gsm8k.jsonl").write_text(
        "".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(9))
    )
    text = (tmp_path / "sft.toml").read_text().replace(f'path = "{tmp_path}/train.jsonl"\n', "")
    text += f"""
[[records.sources]]
path = "{tmp_path}/train.jsonl"
weight = 2
[[records.sources]]
path = "{tmp_path}/mmlu.jsonl"
[[records.sources]]
path = "{tmp_path}/gsm8k.jsonl"
name = "sums"
columns = {{prompt = "question", completion = "answer"}}
"""
    (tmp_path / "mixed.toml").write_text(text)
    return lambda *overrides: load_run(tmp_path / "mixed.toml", SFTConfig, overrides)


def test_a_mixture_has_its_shares_and_resumes_number_for_number(mixed: Configure, tmp_path: Path) -> None:
    options = ("--records.held_out=0.1", "--eval.0.every_steps=3", "--run.steps=10", "--records.tokens_per_step=300")
    run = sft(mixed(*options, "--run.name=whole"))
    whole = read_metrics(run)
    names = ("train", "mmlu", "sums")
    tokens = {name: sum(row.get(f"source_tokens/{name}", 0) for row in whole) for name in names}
    total = sum(tokens.values())
    assert total == sum(row.get("tokens_in_batch", 0) for row in whole)
    for name, share in zip(names, (0.5, 0.25, 0.25), strict=True):
        assert tokens[name] / total == pytest.approx(share, abs=128 / total)
    log = (run / "log.txt").read_text()
    assert "prompt from question and choices, completion from answer; not read: 'subject'" in log
    assert "mmlu, 25.0% of the tokens: " in log

    with interrupted_at(5):
        sft(mixed(*options, "--run.name=part"))
    part = sft(mixed(*options, "--run.name=part", "--run.resume=true"))
    assert figures(read_metrics(part)) == figures(whole)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--records.path=x.jsonl", r"records.path.*there are \[\[records.sources\]\] too: make it one of them"),
        ("--records.epochs=2", r"records.epochs.*the sources of a mixture end at different times; give run.steps"),
        ("--records.held_out_split=test", r"records.held_out_split.*of which source\?"),
        ("--records.subset=main", r"records.subset.*is of one dataset; give it to each"),
    ],
)
def test_what_a_mixture_is_not(mixed: Configure, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixed(override)


def test_neither_a_dataset_nor_a_mixture(configure: Configure, tmp_path: Path) -> None:
    file = tmp_path / "sft.toml"
    file.write_text(file.read_text().replace(f'path = "{tmp_path}/train.jsonl"\n', ""))
    with pytest.raises(ConfigError, match=r"path: missing: give it \(one dataset\) or \[\[records.sources\]\]"):
        configure()


def test_targets_are_the_labels_and_the_rest_is_read() -> None:
    import numpy as np

    from nmoe.data.examples import Example

    first = Example(np.array([5, 6, 7, 8], np.int32), np.array([IGNORED, IGNORED, 7, 9], np.int32))
    second = Example(np.array([3, 4], np.int32), np.array([3, 4], np.int32))
    batch = example_batch([first, second])
    assert batch.lengths == (3, 1)
    assert batch.inputs_T.tolist() == [5, 6, 7, 3]
    assert batch.targets_T.tolist() == [6, 7, 9, 4]
    assert batch.scored_T.tolist() == [False, True, True, True]
    torch.testing.assert_close(batch.weights_T, torch.tensor([0, 1 / 3, 1 / 3, 1 / 3]))


def test_sequences_end_with_their_last_learned_token(workshop: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(workshop / "tokenizer")
    path = tmp_path / "x.jsonl"
    rows = [{"messages": [*record("Reverse: 01", "10")["messages"], {"role": "user", "content": "Reverse: 55"}]}]
    rows += [
        {"messages": [{**message, "weight": int(n == 1)} for n, message in enumerate(record("a", "b")["messages"] * 2)]}
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = read_examples(DatasetSettings(path=str(path)), make_renderer(tokenizer), tokenizer, 64)
    assert len(examples) == examples.records == 2
    for index in range(2):
        assert examples[index].labels[-1] == tokenizer.special_id("<|return|>")
        assert examples.lengths[index] == len(examples[index].ids) - 1
    assert examples.learned == sum(int((examples[index].labels[1:] != IGNORED).sum()) for index in range(2))
