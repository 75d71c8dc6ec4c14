"""Evaluates multiple-choice problems by likelihood, without sampling, as lm-evaluation-harness does.

The command is `nmoe eval CHECKPOINT... mmlu --mode likelihood_letter`. There are three results:

- `likelihood_letter` (the harness's `mmlu`): the prompt lists the options, and the model chooses the most likely letter;
- `likelihood_text` (its `acc` of ARC): the prompt has no options, and the model chooses the option whose text is most likely;
- `likelihood_text_norm` (its `acc_norm`): the same, with each log-probability divided by the option's length in characters.

Prompts have no examples (zero-shot). Since nothing is sampled, base models need not follow an answer format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase

import torch

from nmoe.config.loader import load_environment
from nmoe.cores import choose_threads
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.core import cut
from nmoe.eval.evaluate import NO_LABELS, Evaluation, distinct_problems, models_and_benchmarks, summarise_outcomes
from nmoe.eval.likelihood import Continuation, Likelihood, likelihoods
from nmoe.eval.outcomes import Outcome, key_of
from nmoe.eval.overlap import TrainedOn, find_overlap
from nmoe.eval.sweep import Cell, compare, table, table_json
from nmoe.model.policy import load_policy_on
from nmoe.model.transformer import Transformer
from nmoe.runs.progress import counting
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import write_atomically
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Precision, Problem

_FIGURES = {"likelihood_letter": ("likelihood_letter",), "likelihood_text": ("likelihood_text", "likelihood_text_norm")}


def prompt_and_answers(problem: Problem, mode: str) -> tuple[str, list[str]]:
    r"""Returns the prompt of a multiple-choice problem, and the answers to score after it, each of which follows a space.

    For the record {"question": "Capital of France?", "choices": ["Paris", "Rome"], "subject": "world_facts"}, the mode
    `likelihood_letter` gives "The following are multiple choice questions (with answers) about world facts.\n\nCapital
    of France?\nA. Paris\nB. Rome\nAnswer:" and ["A", "B"]; the other modes give "Question: Capital of France?\nAnswer:"
    and ["Paris", "Rome"].
    """
    options = [str(option) for option in json.loads(str(problem.metadata["options"]))]
    letters = list(ascii_uppercase[: len(options)])
    shown = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=True))
    question = problem.question.removesuffix(f"\n\n{shown}")
    if mode != "likelihood_letter":
        return f"Question: {question}\nAnswer:", options
    subject = str(problem.metadata.get("subject", "")).replace("_", " ")
    about = f"The following are multiple choice questions (with answers) about {subject}.\n\n" if subject else ""
    return f"{about}{question.strip()}\n{shown}\nAnswer:", letters


def choose(scored: Sequence[Likelihood], answers: Sequence[str], mode: str) -> int:
    """Returns the index of the most likely answer; the first one if several are equally likely.

    `likelihood_text_norm` divides each log-probability by the number of characters in its answer.
    """
    sums = [sum(one.logprobs) for one in scored]
    if mode == "likelihood_text_norm":
        sums = [one / len(answer) for one, answer in zip(sums, answers, strict=True)]
    return sums.index(max(sums))


def choices(
    model: Transformer, tokenizer: Tokenizer, problems: Sequence[Problem], mode: str
) -> Iterator[tuple[list[Likelihood], list[str]]]:
    """Yields, for each problem, the likelihood of each of its answers, and the answers themselves."""
    asked = [prompt_and_answers(problem, mode) for problem in problems]
    opening, context = tokenizer.opening_ids, model.config.context_tokens

    def continuations() -> Iterator[list[Continuation]]:
        for prompt, answers in asked:
            before = len(opening) + len(tokenizer.encode(prompt))
            wholes = [[*opening, *tokenizer.encode(f"{prompt} {answer}")] for answer in answers]
            # A tokenizer may join the end of the prompt with an answer; its last token is scored even then.
            yield [cut(Continuation(whole, min(before, len(whole) - 1)), context) for whole in wholes]

    for scored, (_, answers) in zip(likelihoods(model, continuations()), asked, strict=True):
        yield scored, answers


def choices_command(
    named: Sequence[Path],
    mode: str,
    problems: int | None,
    device: str = "auto",
    out: Path | None = None,
    *,
    allow_trained_on: bool = False,
    precision: Precision | None = None,
    labels: Mapping[Path, str] = NO_LABELS,
) -> None:
    """Evaluates every model on every multiple-choice benchmark, and prints a table with paired tests; `out` receives it
    as JSON.

    `named` lists checkpoints, then benchmarks. `problems` limits the evaluation to the first problems of each
    benchmark. Raises UserError if a model or benchmark cannot be loaded, if a benchmark is not multiple choice, and if
    a model was trained on a benchmark, unless `allow_trained_on` permits it.
    """
    if out is not None and out.is_dir():
        raise UserError(f"{out}: is a directory; --out names a file to write")
    checkpoints, benchmarks = models_and_benchmarks(named, labels)
    torch.set_num_threads(choose_threads(0))
    found = [
        _evaluate(one, benchmarks, mode, problems, device, precision, allow_trained_on=allow_trained_on)
        for one in checkpoints
    ]
    records = []
    for each in _FIGURES[mode]:
        cells = [cell for of_model in found for cell in of_model if cell.result.mode == each]
        comparisons = compare(cells)
        for line in table(cells, comparisons, labels):
            print(line)
        records.append(table_json(cells, comparisons, labels))
    if out is not None:
        whole = {key: [row for record in records for row in record[key]] for key in records[0]}
        write_atomically(out, json.dumps(whole, indent=2).encode() + b"\n")


def _evaluate(
    checkpoint: Path,
    benchmarks: Sequence[Path],
    mode: str,
    count: int | None,
    device: str,
    precision: Precision | None,
    *,
    allow_trained_on: bool,
) -> list[Cell]:
    """Evaluates one checkpoint; returns a table cell for each pair of benchmark and result name."""
    directory = resolve_checkpoint(checkpoint)
    tokenizer = Tokenizer.load(directory)
    asked: dict[str, list[Problem]] = {}
    trained_on: dict[str, int | None] = {}
    trained = TrainedOn(checkpoint, directory)
    for benchmark in benchmarks:
        environment = Environment.from_settings(load_environment(benchmark), tokenizer)
        name, most = environment.settings.env_id, count or environment.pool.size or 200
        overlap = find_overlap(environment, most, trained, allowed=allow_trained_on)
        trained_on[name] = (overlap.common or None) if overlap is not None else None
        asked[name] = distinct_problems(environment, most)
        if other := {one.task_type for one in asked[name]} - {"multiple_choice"}:
            raise UserError(f"{name}: {mode} is of multiple choice, not of problems of type {', '.join(sorted(other))}")
    model = load_policy_on(directory, device, precision=precision).requires_grad_(False)
    cells = []
    for name, problems in asked.items():
        right: dict[str, list[bool]] = {one: [] for one in _FIGURES[mode]}
        with counting("problems", len(problems)) as done:
            for index, (scored, answers) in enumerate(choices(model, tokenizer, problems, mode)):
                gold = ascii_uppercase.index(problems[index].gold)
                for one in _FIGURES[mode]:
                    right[one].append(choose(scored, answers, one) == gold)
                done(index + 1)
        cells += [_cell(checkpoint, name, one, problems, right[one], trained_on[name]) for one in _FIGURES[mode]]
    return cells


def _cell(
    checkpoint: Path, name: str, mode: str, problems: Sequence[Problem], right: Sequence[bool], trained_on: int | None
) -> Cell:
    outcomes = [
        Outcome(key_of(problem), problem.source, tuple(problem.groups), (one,), 0)
        for problem, one in zip(problems, right, strict=True)
    ]
    evaluations: list[Evaluation] = [
        replace(one, mode=mode, trained_on=trained_on if one.outcomes else None)
        for one in summarise_outcomes(outcomes, name, 0.0)
    ]
    return Cell(checkpoint, name, evaluations, evaluations[0])
