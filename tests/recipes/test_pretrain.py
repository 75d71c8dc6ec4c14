"""Pretraining: what a batch of documents scores, what the base learned, and what a resumption insists on."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupted_runs import figures, interrupted_at

from nmoe.config.commands import PretrainConfig
from nmoe.config.loader import load_run
from nmoe.data.documents import Document, DocumentReader
from nmoe.data.spans import spans_of
from nmoe.errors import UserError
from nmoe.learner.passes import batch_logprobs
from nmoe.model.checkpoint import load_model
from nmoe.recipes.pretrain import document_batch, pretrain
from nmoe.runs.comparison import diff_runs
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.provenance import recorded_threads
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.summary import show_run
from nmoe.text.tokenizer import Tokenizer

SHORT = ("--run.steps=1", "--optimizer.warmup_steps=0", "--eval=[]", "--data.tokens_per_step=64")


def documents_of(path: Path, tokenizer: Tokenizer) -> list[Document]:
    found = [DocumentReader(tokenizer, 64).read(span).pieces for span in spans_of(str(path), 1 << 20)]
    return [document for pieces in found if pieces is not None for document in pieces]


def test_every_token_after_the_first_is_predicted() -> None:
    batch = document_batch([Document(np.array([5, 6, 7])), Document(np.array([8, 9]))])
    assert batch.lengths == (2, 1)
    assert batch.inputs_T.tolist() == [5, 6, 8]
    assert batch.targets_T.tolist() == [6, 7, 9]
    assert batch.scored_T.tolist() == [True, True, True]
    torch.testing.assert_close(batch.weights_T, torch.full((3,), 1 / 3))


def test_a_prompt_is_no_part_of_the_loss() -> None:
    batch = document_batch([Document(np.array([5, 6, 7, 4]), prompt=2), Document(np.array([8, 9]))])
    assert batch.scored_T.tolist() == [False, True, True, True]
    torch.testing.assert_close(batch.weights_T, torch.tensor([0, 1 / 3, 1 / 3, 1 / 3]))


def test_the_held_out_loss_is_that_of_the_last_documents(workshop: Path, base: Path) -> None:
    rows = read_metrics(base)
    assert [row["step"] for row in rows if "held_out_loss" in row] == [200, 400, 600]
    directory = resolve_checkpoint(base)
    held_out = documents_of(workshop / "corpus.jsonl", Tokenizer.load(directory))[-50:]
    logprobs_N = batch_logprobs(load_model(directory), document_batch(held_out), 4096, 1.0)
    assert len(logprobs_N) == sum(document.positions for document in held_out)
    assert rows[-1]["held_out_loss"] == pytest.approx(float(-logprobs_N.mean()), abs=1e-6)
    assert rows[-1]["held_out_loss"] < rows[0]["loss"] / 10
    start, last = (json.loads((base / "eval" / f"step_{step:06}.json").read_text())["results"][0] for step in (0, 600))
    assert last["since_start"]["difference"] == pytest.approx(last["value"] - start["value"], abs=1e-5)
    assert (last["problems"], last["value"]) == (50, rows[-1]["held_out_loss"])


def test_a_run_goes_on_with_the_threads_it_began_with(workshop: Path, tmp_path: Path) -> None:
    def run(*overrides: str) -> Path:
        overrides = (*SHORT, f"--run.directory={tmp_path}", *overrides)
        return pretrain(load_run(workshop / "base.toml", PretrainConfig, overrides))

    path = run("--run.threads=2")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    run("--run.threads=1", "--run.steps=2", "--run.resume=true")
    assert torch.get_num_threads() == recorded_threads(path) == 2
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    # The one step that it began with was all of its schedule; the next takes the rate where that ends.
    first, second = (row["learning_rate"] for row in read_metrics(path))
    assert second == pytest.approx(0.1 * first)
    assert (
        "learning rate: goes on as it began, falling until optimizer step 1, and stays at"
        in (path / "log.txt").read_text()
    )
    torch.set_num_threads(1)


def test_the_configuration_of_an_extended_run_repeats_it(workshop: Path, tmp_path: Path) -> None:
    """Its schedule is that of the run that was extended, its threads those that it used; what differs from that run is told."""
    given = (*SHORT, f"--run.directory={tmp_path}", "--optimizer.warmup_steps=1", "--run.threads=1")
    first = pretrain(load_run(workshop / "base.toml", PretrainConfig, (*given, "--run.name=first", "--run.steps=3")))
    shutil.copytree(first, tmp_path / "longer", symlinks=True)
    name = (tmp_path / "longer/config.toml").read_text().replace('name = "first"', 'name = "longer"')
    (tmp_path / "longer/config.toml").write_text(name)
    longer = (*given, "--run.name=longer", "--run.threads=2", "--run.resume=true")
    pretrain(load_run(workshop / "base.toml", PretrainConfig, (*longer, "--run.steps=5")))
    path = pretrain(load_run(workshop / "base.toml", PretrainConfig, (*longer, "--run.steps=6")))
    config = tomllib.loads((path / "config.toml").read_text())
    kept = {key: config["run"][key] for key in ("steps", "threads", "resume")}
    assert (kept, config["optimizer"]["schedule_steps"]) == ({"steps": 6, "threads": 1, "resume": False}, 3)
    again = pretrain(load_run(path / "config.toml", PretrainConfig, ("--run.name=again",)))
    numbers = [[(row["loss"], row["learning_rate"]) for row in read_metrics(run)] for run in (path, again)]
    assert len(numbers[0]) == 6
    assert numbers[0] == numbers[1]
    assert numbers[0][-1][1] == pytest.approx(0.1 * numbers[0][1][1]), "the rate where the schedule of 3 steps ends"
    second = "optimizer.schedule_steps 0 -> 3, run.steps 3 -> 5"
    said = [line for line in diff_runs(str(path), str(again)) if "resumed" in line]
    assert [re.sub(r" at \S+Z", "", line) for line in said] == [
        f"  {path} was resumed from step 3, {second}",
        f"  {path} was resumed from step 5, run.steps 5 -> 6",
    ]
    assert second in "\n".join(show_run(path))


def test_a_run_does_not_go_on_with_other_documents(workshop: Path, tmp_path: Path) -> None:
    lines = (workshop / "corpus.jsonl").read_text().splitlines()
    documents = tmp_path / "documents.jsonl"
    documents.write_text("\n".join(lines[:100]))
    overrides = [*SHORT, f"--run.directory={tmp_path}", f"--data.documents={documents}"]
    pretrain(load_run(workshop / "base.toml", PretrainConfig, overrides))
    first = json.loads(lines[0])["token_ids"]
    documents.write_text("\n".join([json.dumps({"token_ids": [*first[:-1], first[0]]}), *lines[1:100]]))
    message = r"not the documents that this run began with \(documents\.jsonl has other documents, 100 as before\)"
    with pytest.raises(UserError, match=message):
        pretrain(load_run(workshop / "base.toml", PretrainConfig, [*overrides, "--run.steps=2", "--run.resume=true"]))


MIXTURE = """
[[data.sources]]
path = "digits.jsonl"
weight = 3.0

[[data.sources]]
path = "letters.jsonl@[:40]"
name = "words"

"""


@pytest.fixture
def mixture(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PretrainConfig]:
    """The configuration of a run on two sources: three parts of the workshop's documents, one of words."""
    monkeypatch.chdir(tmp_path)
    lines = (workshop / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "digits.jsonl").write_text("\n".join(lines[:200]))
    words = [json.dumps({"text": f"word {'ab' * (i % 5)}{i % 7}"}) for i in range(60)]
    (tmp_path / "letters.jsonl").write_text("\n".join(words))
    text = (workshop / "base.toml").read_text()
    text = re.sub("(?m)^documents = .*\n", "", text).replace("[optimizer]", MIXTURE + "[optimizer]")
    (tmp_path / "mixture.toml").write_text(text)
    fixed = ["--run.steps=8", "--eval.0.every_steps=4", "--data.held_out_documents=5", "--checkpoint.every_steps=3"]

    def configured(*overrides: str) -> PretrainConfig:
        return load_run(tmp_path / "mixture.toml", PretrainConfig, [*fixed, f"--run.directory={tmp_path}", *overrides])

    return configured


def test_a_mixture_trains_by_weight_and_is_evaluated_by_source(
    mixture: Callable[..., PretrainConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = pretrain(mixture())
    rows = read_metrics(run)
    tokens = {name: sum(row[f"source_tokens/{name}"] for row in rows) for name in ("digits", "words")}
    assert sum(tokens.values()) == sum(row["tokens_in_batch"] for row in rows)
    assert tokens["digits"] / sum(tokens.values()) == pytest.approx(0.75, abs=0.01)
    directory = resolve_checkpoint(run)
    tokenizer, model = Tokenizer.load(directory), load_model(directory)
    for path, name, last in (("digits.jsonl", "digits", 200), ("letters.jsonl", "words", 40)):
        held_out = documents_of(Path(path), tokenizer)[last - 5 : last]
        logprobs_N = batch_logprobs(model, document_batch(held_out), 4096, 1.0)
        assert rows[-1][f"held_out_loss/{name}"] == pytest.approx(float(-logprobs_N.mean()), abs=1e-6)
    digits, words = (rows[-1][f"held_out_loss/{name}"] for name in ("digits", "words"))
    assert rows[-1]["held_out_loss"] == pytest.approx(0.75 * digits + 0.25 * words)
    shown = capfd.readouterr().out
    assert "digits, 75.0% of the tokens: 195 documents of" in shown
    assert "words, 25.0% of the tokens: 35 documents of" in shown


def test_a_corpus_larger_than_its_buffer_is_streamed_and_resumed(
    workshop: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = (workshop / "corpus.jsonl").read_text().splitlines(keepends=True)
    for part in range(3):
        (tmp_path / f"part-{part}.jsonl").write_text(
            "".join(lines[part::3]) * (400_000 // len("".join(lines[part::3])) + 1)
        )
    overrides = [f"--run.directory={tmp_path}", f"--data.documents={tmp_path}/part-*.jsonl", "--data.shuffle_mb=1"]
    overrides += ["--run.steps=6", "--eval.0.every_steps=3", "--data.held_out_documents=9", "--data.workers=0"]

    def run(*more: str) -> Path:
        return pretrain(load_run(workshop / "base.toml", PretrainConfig, [*overrides, *more]))

    whole = read_metrics(run("--run.name=whole"))
    shown = capfd.readouterr().out
    assert re.search(r"documents in \d MB, about [\d,]+ tokens: 0\.\d\d epochs", shown), shown
    with interrupted_at(4):
        run("--run.name=broken")
    assert figures(read_metrics(run("--run.name=broken", "--run.resume=true"))) == figures(whole)
    (tmp_path / "part-1.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match=r"part-1\.jsonl has [\d,]+ documents, had [\d,]+"):
        run("--run.name=broken", "--run.resume=true", "--run.steps=7")


def test_a_mixture_that_was_interrupted_goes_on_number_for_number(
    mixture: Callable[..., PretrainConfig],
) -> None:
    whole = read_metrics(pretrain(mixture("--run.name=whole")))

    with interrupted_at(5):
        pretrain(mixture("--run.name=broken"))
    broken = pretrain(mixture("--run.name=broken", "--run.resume=true"))
    assert (broken / "log.txt").read_text().count("resumed from step 5") == 1
    assert figures(read_metrics(broken)) == figures(whole)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ('{path = "letters.jsonl"}, {path = "other/letters.jsonl"}', "is used before; names must be unique"),
        ('{path = "letters.jsonl", weight = 0.0}', "must be more than 0"),
        ('{path = "letters.jsonl", name = "a/b"}', "the source's name would be 'a/b'"),
        ('{path = ".hidden"}', "the source's name would be ''; give it a `name`"),
        ("{weight = 1.0}", "path"),
    ],
)
def test_sources_that_can_not_be_mixed(
    mixture: Callable[..., PretrainConfig], tmp_path: Path, sources: str, message: str
) -> None:
    config = tmp_path / "mixture.toml"
    text = re.sub(r"\[\[data.sources\]\]\n(\w+ = .*\n)+", "", config.read_text())
    config.write_text(text.replace("[data]", f"[data]\nsources = [{sources}]"))
    with pytest.raises(UserError, match=re.escape(message)):
        mixture()


def test_documents_are_one_dataset_or_several_sources(
    mixture: Callable[..., PretrainConfig], workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"there are \[\[data.sources\]\] too"):
        mixture("--data.documents=letters.jsonl")
    config = tmp_path / "neither.toml"
    config.write_text(re.sub("(?m)^documents = .*\n", "", (workshop / "base.toml").read_text()))
    with pytest.raises(UserError, match="needs either documents"):
        load_run(config, PretrainConfig)
    (tmp_path / "letters.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match=r"letters\.jsonl@\[:40\]: data\.held_out_documents = 5 leaves none of its 1"):
        pretrain(mixture())


def test_collapsing_experts_are_told_of_once(workshop: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Any load is too uneven, and none recovers.
    rule = {"violation": "1e-9", "warmup_steps": "0", "balance_steps": "0", "steps": "2"}
    overrides = [f"--run.directory={tmp_path}", *SHORT, "--run.steps=4"]
    overrides += [f"--monitor.experts.{key}={value}" for key, value in rule.items()]
    run = pretrain(load_run(workshop / "base.toml", PretrainConfig, overrides))
    (alert,) = read_lines(run / "alerts.jsonl")
    assert alert["step"] == 2
    assert "experts collapse in layer 0" in alert["message"]
    assert "raise model.router_aux_loss_coef" in alert["remedies"][0]
    assert capfd.readouterr().out.count("experts collapse") == 1
    shares = read_metrics(run)[-1]["expert_load/1"]
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(1, abs=1e-4)
