"""Verifier training: what is trained on and held out, that it learns, resumes exactly, and what changed since the start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from stepwise_cases import write_stepwise

from nmoe.config.commands import VerifierConfig
from nmoe.config.loader import load_run
from nmoe.config.tables.recipes import VerifierSection
from nmoe.data.prm import LabelledSteps
from nmoe.errors import UserError
from nmoe.eval.early_stopping import since_baseline
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.speedrun.steps import step_texts, write_prm800k
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier.judge import Description, Judge
from nmoe.verifier.train import LabelledSolution, evaluate, judged_solutions, read_data, verifier, whole_solutions

CONFIG = """
[run]
name = "verifier"
directory = "HERE"
steps = 4
threads = 1

[model]
tokenizer = "HERE/tokenizer"

[model.shape]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
intermediate_size = 64
context_tokens = 160

[verifier]
prm_source = "HERE/phase2_train.jsonl"
held_out_share = 0.2
tokens_per_step = 1024

[optimizer]
learning_rate = 1e-2

[[eval]]
every_steps = 2
problems = 40

[checkpoint]
every_steps = 2
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("verifier")
    Tokenizer.train(step_texts(0, 20), 500).save(here / "tokenizer")
    write_prm800k(here / "phase2_train.jsonl", 0, 300, "train")
    (here / "verifier.toml").write_text(CONFIG.replace("HERE", str(here)))
    return here


def run(here: Path, tmp_path: Path, *overrides: str) -> Path:
    return verifier(load_run(here / "verifier.toml", VerifierConfig, [f"--run.directory={tmp_path}", *overrides]))


def obvious(path: Path) -> None:
    """Solutions whose wrong step says so."""
    with path.open("w") as file:
        for number in range(300):
            wrong = number % 4
            steps = ["4+7=11", "11+2=13", "13+5=18"]
            if wrong < 3:
                steps[wrong] = "wrong"
            labels = [step != "wrong" for step in steps]
            file.write(json.dumps({"prompt": f"Sum: {number}", "completions": steps, "labels": labels}) + "\n")


@pytest.mark.parametrize(
    ("head", "reads"), [("generative", "last"), ("discriminative", "last"), ("discriminative", "every")]
)
def test_it_learns_to_find_the_wrong_step(here: Path, tmp_path: Path, head: Any, reads: Any) -> None:
    obvious(tmp_path / "obvious.jsonl")
    path = run(
        here,
        tmp_path,
        f"--verifier.prm_source={tmp_path}/obvious.jsonl",
        f"--verifier.head={head}",
        f"--verifier.reads={reads}",
        "--run.steps=130" if head == "generative" else "--run.steps=30",
        "--verifier.tokens_per_step=3072" if head == "generative" else "--verifier.tokens_per_step=1024",
        "--eval.0.every_steps=1000",
    )
    row = read_metrics(path)[-1]
    assert row["verifier_f1"] > 0.95
    assert row["verifier_accuracy"] > 0.95
    assert row["verifier_brier"] < 0.05
    start, record = (json.loads(file.read_text()) for file in sorted((path / "eval").iterdir()))
    assert (start["step"], record["step"]) == (0, row["step"])
    assert [result["mode"] for result in record["results"]] == [
        "processbench_f1",
        "error_located",
        "all_correct",
        "step_accuracy",
    ]
    assert sum(part["count"] for part in record["calibration"]) > 80
    judge, described = Judge.load(path)
    assert described == Description("step", head, neutral=False, reads=reads)
    (said,) = judge.probabilities([([Message("user", "Sum: 7")], ["4+7=11", "wrong", "13+5=18"])])
    assert said[0, 1] > 0.7
    assert said[1, 1] < 0.3


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--verifier.head=discriminative", "--verifier.language_weight=1.0"),
        ("--verifier.head=discriminative", "--verifier.language_weight=1.0", "--verifier.reads=every"),
    ],
)
def test_a_run_goes_on_number_for_number(here: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    whole = run(here, tmp_path, "--run.name=whole", *overrides)
    # As a kill after the second checkpoint leaves it: what follows is the schedule of the whole run.
    (tmp_path / "broken").mkdir()
    broken = run(here, tmp_path, "--run.name=broken", *overrides)
    for checkpoint in (broken / "checkpoints").glob("*4"):
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    (broken / "checkpoints/latest").unlink()
    (broken / "checkpoints/best").unlink()
    run(here, tmp_path, "--run.name=broken", "--run.resume=true", *overrides)
    for one, other in zip(read_metrics(whole), read_metrics(broken), strict=True):
        kept = {name for name in one if "time" not in name and "per_second" not in name}
        assert {name: one[name] for name in kept} == {name: other[name] for name in kept}
    first, second = (
        {
            file.name: file.read_bytes()
            for file in resolve_checkpoint(path).iterdir()
            if file.suffix in (".safetensors", ".json")
        }
        for path in (whole, broken)
    )
    assert first == second
    assert "verifier.json" in first
    assert ("head.safetensors" in first) == bool(overrides)


def test_training_goes_on_from_a_verifier_with_its_head(here: Path, tmp_path: Path) -> None:
    first = run(here, tmp_path, "--verifier.head=discriminative")
    text = CONFIG.replace("HERE", str(here)).partition("[model]")[0] + f'[model]\npath = "{first}"\n'
    text += "[verifier]" + CONFIG.replace("HERE", str(here)).partition("[verifier]")[2]
    (tmp_path / "more.toml").write_text(text.replace('name = "verifier"', 'name = "more"'))

    def more(*overrides: str) -> Path:
        return verifier(load_run(tmp_path / "more.toml", VerifierConfig, [f"--run.directory={tmp_path}", *overrides]))

    path = more("--verifier.head=discriminative", "--run.steps=1", "--optimizer.learning_rate=1e-9")
    before, after = (resolve_checkpoint(one) / "head.safetensors" for one in (first, path))
    from safetensors.torch import load_file

    for name, tensor in load_file(before).items():
        assert tensor.abs().max() > 0
        assert (tensor - load_file(after)[name]).abs().max() < 1e-6
    with pytest.raises(UserError, match="a head of kind 'step', where one of kind 'score' is wanted"):
        more("--run.name=other", "--verifier.head=discriminative", "--verifier.mode=score")


@pytest.mark.parametrize("head", ["generative", "discriminative"])
def test_scores_of_whole_solutions(here: Path, tmp_path: Path, head: str) -> None:
    path = run(here, tmp_path, "--verifier.mode=score", f"--verifier.head={head}")
    rows = read_metrics(path)
    assert "verifier_accuracy" in rows[-1]
    assert "verifier_f1" not in rows[-1]
    judge, _ = Judge.load(path)
    (said,) = judge.probabilities([([Message("user", "Sum: 4+7+2")], ["4+7=11"])])
    assert said.shape == (1, 3)
    assert float(said.sum()) == pytest.approx(1, abs=1e-5)


def labelled(problem: str, *steps: str, labels: str, finished: bool = True, **more: Any) -> LabelledSteps:
    return LabelledSteps(problem, steps, tuple(labels), finished, "here", **more)


def test_a_prefix_is_labelled_once() -> None:
    solutions = [
        labelled("p", "a", "b", labels="++"),
        labelled("p", "a", "c", labels="+-", alternative=True),
        labelled("p", " a", "b", labels="++"),
        labelled("q", "a", labels="+"),
    ]
    found = judged_solutions(solutions, VerifierSection(), 0)
    assert [(one.problem, one.labels) for one in found] == [("p", ("+", "+")), ("p", (None, "-")), ("q", ("+",))]
    assert [one.first_wrong for one in whole_solutions(solutions, VerifierSection(), 0)] == [None, None, None]
    # One that nobody labelled takes no label away from the next.
    unlabelled = LabelledSteps("p", ("a", "b"), (None, "+"), True, "here")
    found = judged_solutions([unlabelled, *solutions[1:2]], VerifierSection(), 0)
    assert [one.labels for one in found] == [(None, "+"), ("+", "-")]


def test_a_part_of_a_right_solution_is_worth_half() -> None:
    solutions = [
        labelled("p", "a", "b", labels="++"),
        labelled("q", "a", "b", labels="+-", rest=("c",)),
        labelled("r", "a", labels="+", finished=False),
        labelled("s", "a", labels="+"),
    ]
    found = whole_solutions(solutions, VerifierSection(mode="score"), 0)
    assert [(one.problem, one.steps, one.labels) for one in found] == [
        ("p", ("a", "b"), ("1",)),
        ("p", ("a",), ("0.5",)),
        ("q", ("a", "b", "c"), ("0",)),
        ("r", ("a",), ("0.5",)),
        ("s", ("a",), ("1",)),
    ]


def test_no_problem_is_both_trained_and_evaluated_on(here: Path, tmp_path: Path) -> None:
    section = VerifierSection(prm_source=str(here / "phase2_train.jsonl"), held_out_share=0.3)
    train, held_out = read_data(section)
    assert not {one.problem for one in train.solutions} & {one.problem for one in held_out.solutions}
    assert 0.2 < len(held_out.solutions) / (len(train.solutions) + len(held_out.solutions)) < 0.4
    write_stepwise(tmp_path / "other.jsonl", 0, 50, "eval")
    shared = train.solutions[0]
    with (tmp_path / "other.jsonl").open("a") as file:
        record = {
            "prompt": shared.problem,
            "completions": shared.steps,
            "labels": [one == "+" for one in shared.labels],
        }
        file.write(json.dumps(record) + "\n")
    train, held_out = read_data(
        section.model_copy(update={"held_out_source": str(tmp_path / "other.jsonl"), "held_out_split": "train"})
    )
    assert shared.problem not in {one.problem for one in train.solutions}
    assert train.dropped["solutions to problems that are evaluated on"] >= 1
    assert len(held_out.solutions) == 51


def test_what_is_too_long_is_counted(here: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = {"prompt": "p", "completions": ["4+7=11"] * 40, "labels": [True] * 40}
    lines = (here / "phase2_train.jsonl").read_text()
    obvious(tmp_path / "some.jsonl")
    with (tmp_path / "some.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    assert lines
    source = f"--verifier.prm_source={tmp_path}/some.jsonl"
    path = run(here, tmp_path, source, "--verifier.head=discriminative", "--run.steps=1")
    line = "dropped: 1 solutions longer than the context of 160 tokens"
    assert line in capfd.readouterr().out
    assert line in (path / "log.txt").read_text()
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    with pytest.raises(UserError, match="no solution is left to train on; 1 do not fit"):
        run(here, tmp_path, f"--verifier.prm_source={tmp_path}/long.jsonl", "--run.name=long", "--eval=[]")


def test_impossible_settings_are_refused(here: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="own is a third label of steps"):
        run(here, tmp_path, "--verifier.neutral=own", "--verifier.head=discriminative")
    with pytest.raises(UserError, match="every is what a head reads"):
        run(here, tmp_path, "--verifier.reads=every", "--verifier.head=generative")


def test_what_is_no_verifier_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"verifier\.json: no such file: the checkpoint is not a verifier"):
        Judge.load(tmp_path)
    steps = '{"mode": "steps", "head": "generative", "neutral": false, "reads": "last"}'
    for text in ("{", steps, '{"mode": "step"}'):
        (tmp_path / "verifier.json").write_text(text)
        with pytest.raises(UserError, match=r"verifier\.json: not the description of a verifier"):
            Judge.load(tmp_path)


PROBE = [
    LabelledSolution("a", ("1", "2"), ("+", "-"), first_wrong=1),
    LabelledSolution("b", ("1",), ("+",)),
    LabelledSolution("c", ("1",), ("-",), first_wrong=0),
]


def results(right: list[list[float]]) -> list[dict[str, Any]]:
    said = [torch.tensor([[1 - p, p] for p in one]) for one in right]
    judge = SimpleNamespace(probabilities=lambda asked: said, form=SimpleNamespace(classes=("-", "+")))
    return [dict(one) for one in evaluate(cast(Judge, judge), PROBE, "step", "steps").results]


def test_accuracy_is_paired_by_solution_and_weighted_by_steps(tmp_path: Path) -> None:
    # Right at the start: one step of a. Later: both of a, and b.
    start, later = results([[0.9, 0.9], [0.1], [0.9]]), results([[0.9, 0.1], [0.9], [0.9]])
    (tmp_path / "step_000000.json").write_text(json.dumps({"step": 0, "results": start}))
    found = {one["mode"]: one for one in since_baseline(later, tmp_path)}
    accuracy = found["step_accuracy"]
    assert accuracy["value"] == pytest.approx(3 / 4)
    assert list(accuracy["outcomes"].values()) == [1.0, 1.0, 0.0]
    assert list(accuracy["weights"].values()) == [0.5, 0.25, 0.25]
    assert accuracy["since_start"]["difference"] == pytest.approx(3 / 4 - 1 / 4)
    assert accuracy["since_start"]["low"] < 0.5 < accuracy["since_start"]["high"] <= 1
    assert "since_start" not in found["processbench_f1"]
