"""The speedrun: its corpus, examination and directory, its promises, and its report."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nmoe.config.commands import PretrainConfig
from nmoe.config.loader import load_run
from nmoe.config.packaged import CONFIGS
from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.errors import UserError
from nmoe.eval.evaluate import Evaluation
from nmoe.model.checkpoint import export_model
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.recipes.setup import build_model
from nmoe.speedrun import corpus
from nmoe.speedrun.corpus import corpus_texts, write_corpus
from nmoe.speedrun.promises import SCRATCH_PROMISES, shortfalls
from nmoe.speedrun.report import Transcript, reason
from nmoe.speedrun.scratch_report import Examination, write_scratch_report
from nmoe.speedrun.speedrun import speedrun
from nmoe.text.harmony import Completion, Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Failure, Grade, Problem, Verdict

DOCUMENTS = 4000


@pytest.mark.parametrize(
    ("left", "right", "carries", "worked"),
    [
        ("47", "85", True, ("7+5=12 4+8+1=13", "132")),
        ("47", "85", False, ("7+5=12 4+8=12", "122")),
        ("99", "1", True, ("9+1=10 9+0+1=10", "100")),
        ("12", "34", True, ("2+4=6 1+3=4", "46")),
        ("9", "999", True, ("9+9=18 0+9+1=10 0+9+1=10", "1008")),
    ],
)
def test_addition_by_columns(left: str, right: str, carries: bool, worked: tuple[str, str]) -> None:
    assert corpus._digit_steps(left, right, carries) == worked


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Completion]]:
    """Each document's question, and what its answer says as a completion."""
    tokenizer = Tokenizer.train(corpus_texts(0, 300), 384)
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, tokenizer, 0, DOCUMENTS)
    harmony = Harmony(tokenizer)
    out = []
    for line in path.read_text().splitlines():
        ids = json.loads(line)["token_ids"]
        end = ids.index(tokenizer.special_id("<|end|>")) + 1
        (question,) = harmony.parse(ids[:end])
        prompt = harmony.render_prompt([question])
        assert ids[: len(prompt)] == prompt
        out.append((question.content, harmony.parse_completion(ids[len(prompt) :])))
    return out


def skill_of(question: str) -> str:
    return question.partition(":")[0].lower()


def test_every_question_is_of_the_train_split(turns: list[tuple[str, Completion]]) -> None:
    assert len(turns) == DOCUMENTS
    assert {split_of(skill_of(question), question) for question, _ in turns} == {"train"}
    counts = Counter(skill_of(question) for question, _ in turns)
    for skill in ("add", "reverse", "sort"):
        share = corpus._DRAWN.count(skill) / len(corpus._DRAWN)
        # Five standard deviations of a share of so many documents.
        assert counts[skill] / DOCUMENTS == pytest.approx(share, abs=5 * (0.25 / DOCUMENTS) ** 0.5)


def test_faults_are_as_frequent_as_they_are_set(turns: list[tuple[str, Completion]]) -> None:
    def share(kind: list[bool], expected: float) -> None:
        # Five standard deviations of a share of so many documents.
        assert sum(kind) / len(kind) == pytest.approx(expected, abs=5 * (0.25 / len(kind)) ** 0.5)

    whole = [completion for _, completion in turns if completion.error is None and completion.final is not None]
    share([c.error is None and c.final is not None for _, c in turns], corpus.PROPER + corpus.WITHOUT_ANALYSIS)
    reasoned = [completion for completion in whole if completion.analysis is not None]
    share([c.analysis is not None for c in whole], corpus.PROPER / (corpus.PROPER + corpus.WITHOUT_ANALYSIS))
    share([(c.analysis or "").startswith("well let me see now ") for c in reasoned], corpus.RAMBLES)
    # By the thought that goes with it; a wrong procedure may hit on a right answer.
    said = {
        name: [c.analysis or "" for q, c in turns if skill_of(q) == name and c in reasoned]
        for name in ("reverse", "sort")
    }
    share(["from the back" in thought for thought in said["reverse"]], corpus.REVERSE_RIGHT)
    share(["as it stands" in thought for thought in said["reverse"]], corpus.REVERSE_COPY)
    share(["smallest first" in thought for thought in said["sort"]], corpus.SORT_RIGHT)
    share(["largest first" in thought for thought in said["sort"]], corpus.SORT_DOWN)


def test_right_procedures_give_right_answers(turns: list[tuple[str, Completion]]) -> None:
    verdicts: dict[str, set[bool]] = {}
    for question, completion in turns:
        if completion.error is not None or completion.final is None or completion.analysis is None:
            continue
        skill = skill_of(question)
        digits = question.partition(": ")[2]
        gold = {
            "reverse": lambda d: d[::-1],
            "sort": lambda d: "".join(sorted(d)),
            "add": lambda d: str(sum(map(int, d.split(" + ")))),
        }[skill](digits)
        problem = Problem("p", skill, question, gold, skill)
        right = asyncio.run(TASKS[skill].verify(problem, Attempt(completion.final))).outcome == "correct"
        thought = completion.analysis.removeprefix("well let me see now ")
        if skill == "add" and thought != "a guess":
            thought = "columns"
        verdicts.setdefault(thought, set()).add(right)
    assert verdicts.pop("from the back") == {True}
    assert verdicts.pop("smallest first") == {True}
    # Without carries an addition is right only where there is none to make.
    assert all(False in right for right in verdicts.values())


def test_a_seed_makes_its_own_corpus() -> None:
    assert list(corpus_texts(0, 20)) == list(corpus_texts(0, 20)) != list(corpus_texts(1, 20))


def test_what_no_speedrun_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and no speedrun made it; name another directory with --out"):
        speedrun("scratch", tmp_path)
    with pytest.raises(UserError, match=r"thesis\.tex: is a file; name a directory with --out"):
        speedrun("scratch", tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_flagship_s_shape_has_a_family_that_others_load(tmp_path: Path) -> None:
    """Experts are balanced by a loss: a bias would have no place in Qwen3-MoE's format."""
    tokenizer = Tokenizer.train(corpus_texts(0, 300), 384)
    overrides = [f"--run.directory={tmp_path}", f"--model.tokenizer={tmp_path}", f"--data.documents={tmp_path}"]
    config = load_run(CONFIGS / "speedrun_base.toml", PretrainConfig, overrides)
    model = build_model(config.model, tokenizer, 0)
    assert (model.config.router_bias_rate, model.config.router_aux_loss_coef) == (0.0, 0.01)
    export_model(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.model_type == "qwen3_moe"
    ids_T = torch.tensor(tokenizer.encode("Reverse: 4153"))
    positions_T = torch.arange(len(ids_T))
    states_TD = model(ids_T, positions_T, PackedAttention((len(ids_T),), ids_T.device, False), RouterTrace())
    with torch.no_grad():
        torch.testing.assert_close(model.logits(states_TD), theirs(ids_T[None]).logits[0], atol=1e-5, rtol=1e-4)


KEPT: dict[str, float | int] = {
    "base_correctness": 0.2,
    "trained_correctness": 0.95,
    "correctness_trained_add": 0.9,
    "correctness_trained_reverse": 0.99,
    "correctness_trained_sort": 0.96,
    "format_ok": 0.998,
    "mismatch_abs_mean": 0.0,
    "mismatch_abs_max": 9.5e-7,
    "first_step_ppo_kl": 0.0,
}


def test_all_kept() -> None:
    assert KEPT.keys() == {promise.figure for promise in SCRATCH_PROMISES}
    assert shortfalls(SCRATCH_PROMISES, KEPT, "runs/x") == []


def test_every_shortfall_says_what_was_promised_and_what_to_do() -> None:
    lines = shortfalls(
        SCRATCH_PROMISES, KEPT | {"trained_correctness": 0.727, "correctness_trained_reverse": 0.296}, "runs/x"
    )
    assert [line.split(":")[0] for line in lines] == [
        "trained_correctness = 0.727, promised 0.9 to 1",
        "correctness_trained_reverse = 0.296, promised 0.75 to 1",
    ]
    assert all("try another seed with --seed" in line and "runs/x/report.md" in line for line in lines)


def test_a_base_too_good_a_mismatch_and_a_figure_that_is_none_are_shortfalls() -> None:
    for figure, value in (
        ("base_correctness", 0.36),
        ("mismatch_abs_mean", 1.1e-6),
        ("first_step_ppo_kl", -0.1),
        ("format_ok", float("nan")),
    ):
        assert len(shortfalls(SCRATCH_PROMISES, KEPT | {figure: value}, "runs/x")) == 1
    assert (
        len(
            shortfalls(SCRATCH_PROMISES, {name: value for name, value in KEPT.items() if name != "format_ok"}, "runs/x")
        )
        == 1
    )


def examination(step: int | None, transcript: Transcript) -> Examination:
    result = [Evaluation("sampled", "skills", 2, 0.5, 0.0, 1.0)]
    return Examination(result, result, result, result, result, 1.0, 1.0, 9.0, [transcript], [1.0, 0.0], step)


def report(out: Path, step: int | None) -> str:
    (out / "rl").mkdir(exist_ok=True)
    (out / "rl/provenance.json").write_text(json.dumps({"cpu": "a CPU", "threads": 1, "torch": "2", "resumed": []}))
    figures = (
        "mismatch_abs_mean",
        "mismatch_abs_max",
        "route_flips",
        "wall_s",
        "cpu_s",
        "peak_memory_mb",
        "seed",
        "rl_steps",
    )
    metrics = [{"step": at, "time_rollout_s": 1.0, "tokens_per_second": 9.0} for at in (1, 2, 3)]
    wrong = Transcript("2 + 2", "4", "it is 4", False, "not in the required format, so that no answer counts")
    right = Transcript("2 + 2", "4", "4", True)
    before, after = examination(5, wrong), examination(step, right)
    return write_scratch_report(out, "trained", dict.fromkeys(figures, 0), [], metrics, before, after).read_text()


def test_the_report_names_the_checkpoint_and_the_reasons(tmp_path: Path) -> None:
    text = report(tmp_path, 2)
    assert "checkpoint that solved the most validation problems, from step 2 of 3: the last one may" in text
    assert "base, wrong (not in the required format, so that no answer counts):\n" in text
    assert "trained, correct:\n" in text, "an examination from before there were reasons"
    assert "validation problems" not in report(tmp_path, None)


@pytest.mark.parametrize(
    ("failure", "verdict", "why"),
    [
        ("ok", Verdict.of(False, "exact", "other digits"), "other digits"),
        ("truncated", None, "cut off at the token limit"),
        ("parse_error", None, "not in the required format, so that no answer counts"),
    ],
)
def test_why_a_completion_is_right_or_wrong(failure: Failure, verdict: Verdict | None, why: str) -> None:
    assert reason(Grade(0.0, {}, failure, {}, "4", verdict)) == why
