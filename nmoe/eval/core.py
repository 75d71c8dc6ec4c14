"""The CORE benchmark of DCLM (arXiv:2406.11794), 22 data sets: `nmoe eval CHECKPOINT... core` prints each accuracy and
the score.

Question types, numbers of examples (shots) and random baselines come from DCLM's table, and the rules from nanochat
(`nanochat/core_eval.py`), so that scores are comparable with nanochat's. The few-shot examples of item i are drawn by
`Random(1234 + i)` from the other items. In multiple choice, the model chooses the option with the lowest mean loss over
the tokens after the options' common prefix. In a schema, it chooses the context under which the common ending has the
lowest mean loss. In language modelling, an item is right if every token of the continuation is the most likely one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from nmoe.config.listing import columns
from nmoe.cores import choose_threads
from nmoe.data.hub import kept_datasets
from nmoe.data.rows import read_rows
from nmoe.errors import UserError
from nmoe.eval.evaluate import NO_LABELS, label_of
from nmoe.eval.likelihood import Continuation, Likelihood, common_prefix, likelihoods
from nmoe.model.policy import load_policy_on
from nmoe.model.transformer import Transformer
from nmoe.runs.progress import counting
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import write_atomically
from nmoe.statistics import Interval, binomial_interval, stratified_share
from nmoe.text.harmony import END_OF_TEXT
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Precision

Kind = Literal["multiple_choice", "schema", "language_modeling"]

_SHUFFLE_SEED = 1337


@dataclass(frozen=True)
class CoreSet:
    """A data set of CORE: `kind` is the type of its questions, and `shots` the number of solved examples in each prompt.

    `baseline` is the accuracy of random guessing, and `delimiter` separates a question from its answer.
    """

    name: str
    file: str
    kind: Kind
    shots: int
    baseline: float
    delimiter: str = " "

    def centred(self, accuracy: float) -> float:
        """Rescales an accuracy linearly, so that random guessing gives 0 and all answers right give 1."""
        return (accuracy - self.baseline) / (1 - self.baseline)


_ANSWER = "\nAnswer: "
# In the order of nanochat's table.
CORE = (
    CoreSet("hellaswag_zeroshot", "hellaswag", "multiple_choice", 0, 0.25),
    CoreSet("jeopardy", "jeopardy_all", "language_modeling", 10, 0.0, _ANSWER),
    CoreSet("bigbench_qa_wikidata", "bigbench_qa_wikidata", "language_modeling", 10, 0.0),
    CoreSet("arc_easy", "arc_easy", "multiple_choice", 10, 0.25, _ANSWER),
    CoreSet("arc_challenge", "arc_challenge", "multiple_choice", 10, 0.25, _ANSWER),
    CoreSet("copa", "copa", "multiple_choice", 0, 0.5),
    CoreSet("commonsense_qa", "commonsense_qa", "multiple_choice", 10, 0.403),
    CoreSet("piqa", "piqa", "multiple_choice", 10, 0.5, _ANSWER),
    CoreSet("openbook_qa", "openbook_qa", "multiple_choice", 0, 0.25),
    CoreSet("lambada_openai", "lambada_openai", "language_modeling", 0, 0.0),
    CoreSet("hellaswag", "hellaswag", "multiple_choice", 10, 0.25),
    CoreSet("winograd", "winograd_wsc", "schema", 0, 0.5),
    CoreSet("winogrande", "winogrande", "schema", 0, 0.5),
    CoreSet("bigbench_dyck_languages", "bigbench_dyck_languages", "language_modeling", 10, 0.0),
    CoreSet("agi_eval_lsat_ar", "agi_eval_lsat_ar", "multiple_choice", 3, 0.25),
    CoreSet("bigbench_cs_algorithms", "bigbench_cs_algorithms", "language_modeling", 10, 0.0),
    CoreSet("bigbench_operators", "bigbench_operators", "language_modeling", 10, 0.0),
    CoreSet("bigbench_repeat_copy_logic", "bigbench_repeat_copy_logic", "language_modeling", 10, 0.0),
    CoreSet("squad", "squad", "language_modeling", 10, 0.0),
    CoreSet("coqa", "coqa", "language_modeling", 0, 0.0),
    CoreSet("boolq", "boolq", "multiple_choice", 10, 0.62, _ANSWER),
    CoreSet("bigbench_language_identification", "bigbench_language_identification", "multiple_choice", 10, 0.25),
)


def find_sets() -> dict[CoreSet, Path]:
    """Returns the data sets of CORE that are on this machine, each with the path of its JSONL file.

    Files are searched at any depth below `core` in the directory of local datasets ($NMOE_DATASETS, or a default in the
    user's cache). Raises UserError if there are none.
    """
    directory = kept_datasets() / "core"
    files = {path.stem: path for path in sorted(directory.rglob("*.jsonl"))}
    found = {one: files[one.file] for one in CORE if one.file in files}
    if not found:
        raise UserError(
            f"{directory}: holds none of CORE's sets; copy there scripts/eval/local_data of mosaicml/llm-foundry (18 of 22) or "
            "eval_data of nanochat's eval_bundle.zip (all), or set $NMOE_DATASETS to the directory that holds core/"
        )
    return found


def read_set(one: CoreSet, path: Path, most: int) -> list[Mapping[str, Any]]:
    """Reads a data set, shuffles it with the seed that all CORE harnesses use, and returns its first `most` items.

    Raises UserError if an item lacks a field, or if there are too few items for the examples in a prompt.
    """
    items = []
    for where, row in read_rows(str(path)):
        if why := _why_not(one, row):
            raise UserError(f"{where}: {why}")
        items.append(row)
    random.Random(_SHUFFLE_SEED).shuffle(items)
    items = items[:most]
    if len(items) <= one.shots:
        raise UserError(f"{path}: {len(items)} items; {one.shots} examples and a question need {one.shots + 1}")
    return items


def _why_not(one: CoreSet, row: Mapping[str, Any]) -> str | None:
    options = {"multiple_choice": "choices", "schema": "context_options"}.get(one.kind)
    texts = {"multiple_choice": ["query"], "schema": ["continuation"]}.get(one.kind, ["context", "continuation"])
    for name in texts:
        if not isinstance(row.get(name), str):
            return f"an item of {one.name} needs the text {name!r}"
    if options is None:
        return None
    given, gold = row.get(options), row.get("gold")
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(text, str) for text in given):
        return f"an item of {one.name} needs a list of texts {options!r}"
    if not isinstance(gold, int) or not 0 <= gold < len(given):
        return f"an item of {one.name} needs 'gold', the index of one of its {len(given)} options, not {gold!r}"
    return None


Item = Mapping[str, Any]

_SHOTS_SEED = 1234


def decisions(
    model: Transformer,
    tokenizer: Tokenizer,
    one: CoreSet,
    items: Sequence[Item],
    count: Callable[[int], None] = lambda _: None,
) -> list[bool]:
    """Returns for each item whether the model answers it correctly; `count` is called with the number of items done so far."""
    right = []
    for item, scored in zip(items, scores(model, tokenizer, one, items), strict=True):
        right.append(_is_right(one, item, scored))
        count(len(right))
    return right


def scores(model: Transformer, tokenizer: Tokenizer, one: CoreSet, items: Sequence[Item]) -> Iterator[list[Likelihood]]:
    """Yields the likelihoods of each item's options; for language modelling, the likelihood of its continuation alone."""
    first, context = beginning(tokenizer), model.config.context_tokens

    def asked() -> Iterator[list[Continuation]]:
        for index in range(len(items)):
            texts = prompts(one, items, index)
            sequences = [[*first, *tokenizer.encode(text)] for text in texts]
            yield [cut(found, context) for found in continuations(one, sequences)]

    return likelihoods(model, asked())


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Returns the token that begins a document: the tokenizer's BOS token, else its end-of-text token; an empty list
    without either."""
    for name in (tokenizer.named_tokens.get("bos_token"), END_OF_TEXT):
        if name is not None and tokenizer.has_special(name):
            return [tokenizer.special_id(name)]
    return []


def prompts(one: CoreSet, items: Sequence[Item], index: int) -> list[str]:
    """Returns the texts to score for an item, few-shot examples included.

    They are one text per option; for language modelling, the prompt without and with the continuation.
    """
    others = [number for number in range(len(items)) if number != index]
    drawn = random.Random(_SHOTS_SEED + index).sample(others, one.shots) if one.shots else []
    item = items[index]
    shots = "".join(_solved(one, items[number]) + "\n\n" for number in drawn)
    if one.kind == "multiple_choice":
        return [shots + item["query"] + one.delimiter + choice for choice in item["choices"]]
    if one.kind == "schema":
        return [shots + context + one.delimiter + item["continuation"] for context in item["context_options"]]
    asked = shots + item["context"].strip() + one.delimiter
    # A space at the end would be part of the next token.
    return [asked.strip(), asked + item["continuation"]]


def _solved(one: CoreSet, item: Item) -> str:
    if one.kind == "multiple_choice":
        question, answer = item["query"], item["choices"][item["gold"]]
    elif one.kind == "schema":
        question, answer = item["context_options"][item["gold"]], item["continuation"]
    else:
        question, answer = item["context"].strip(), item["continuation"]
    return str(question + one.delimiter + answer)


def continuations(one: CoreSet, sequences: Sequence[Sequence[int]]) -> list[Continuation]:
    """Returns, for the tokenized texts of an item, which tokens are scored.

    These are the tokens after the texts' common prefix; for a schema, their common suffix.
    """
    if one.kind == "schema":
        suffix = common_prefix([sequence[::-1] for sequence in sequences])
        return [Continuation(sequence, max(1, len(sequence) - suffix)) for sequence in sequences]
    start = max(1, common_prefix(sequences))
    return [
        Continuation(sequence, start) for sequence in (sequences[1:] if one.kind == "language_modeling" else sequences)
    ]


def cut(found: Continuation, context: int) -> Continuation:
    """Removes tokens at the beginning of a sequence that is longer than the model's context."""
    beyond = max(0, len(found.token_ids) - context)
    return Continuation(found.token_ids[beyond:], max(1, found.start - beyond))


def _is_right(one: CoreSet, item: Item, scored: Sequence[Likelihood]) -> bool:
    if one.kind == "language_modeling":
        return scored[0].greedy
    losses = [likelihood.mean_loss for likelihood in scored]
    return losses.index(min(losses)) == item["gold"]


ITEMS = 500


@dataclass(frozen=True)
class SetResult:
    """The result on one data set: the number of right items, and the accuracy rescaled so that random guessing gives 0."""

    name: str
    items: int
    right: int
    baseline: float
    centred: float

    @property
    def accuracy(self) -> float:
        return self.right / self.items


@dataclass(frozen=True)
class CoreResult:
    """The CORE results of one checkpoint; `missing` names the data sets that are not on this machine."""

    checkpoint: str
    sets: Sequence[SetResult]
    missing: Sequence[str]

    @property
    def name(self) -> str:
        """The name of the score: "CORE" with all data sets, else "CORE-N" for N of them, because their means are not
        comparable."""
        return f"CORE-{len(self.sets)}" if self.missing else "CORE"

    @property
    def score(self) -> float:
        """The CORE score: the mean of the data sets' accuracies, each rescaled so that random guessing gives 0."""
        return sum(one.centred for one in self.sets) / len(self.sets)

    @property
    def interval(self) -> Interval:
        """The 95% confidence interval of the CORE score.

        Rescaling is linear in a data set's accuracy. So the score is a linear function of the accuracies' weighted
        mean, where each weight is the factor of its rescaling, 1 / (1 - baseline).
        """
        weights = [1 / (1 - one.baseline) for one in self.sets]
        shares = stratified_share([one.right for one in self.sets], [one.items for one in self.sets], weights)
        mean = sum(weights) / len(weights)
        guessed = sum(weight * one.baseline for weight, one in zip(weights, self.sets, strict=True)) / len(weights)
        return Interval(mean * shares.low - guessed, mean * shares.high - guessed)

    def record(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "score": {"name": self.name, "value": self.score} | asdict(self.interval),
            "missing": list(self.missing),
            "sets": [asdict(one) | {"accuracy": one.accuracy} for one in self.sets],
        }

    def lines(self) -> Iterator[str]:
        rows = [("set", "items", "accuracy", "95% interval", "baseline", "centred")]
        for one in self.sets:
            interval = binomial_interval(one.right, one.items)
            between = f"[{interval.low:.1%}, {interval.high:.1%}]"
            rows.append(
                (one.name, f"{one.items}", f"{one.accuracy:.1%}", between, f"{one.baseline:.1%}", f"{one.centred:.4f}")
            )
        yield from columns(rows)
        without = f", without {', '.join(self.missing)}" if self.missing else ""
        yield f"{self.name} of {self.checkpoint}: {self.score:.4f} [{self.interval.low:.4f}, {self.interval.high:.4f}]{without}"


def core_command(
    checkpoints: Sequence[Path],
    items: int | None,
    device: str,
    out: Path | None,
    precision: Precision | None = None,
    labels: Mapping[Path, str] = NO_LABELS,
) -> None:
    """Evaluates each checkpoint on CORE, prints the scores, and writes them to `out` as JSON, with the labels of checkpoints that
    have one; uses at most `items` per data set (500).

    Raises UserError if no data set is found, if an item lacks a field, and if a checkpoint cannot be loaded.
    """
    if out is not None and out.is_dir():
        raise UserError(f"{out}: is a directory; --out names a file to write")
    read = {one: read_set(one, path, items or ITEMS) for one, path in find_sets().items()}
    directories = [resolve_checkpoint(one) for one in checkpoints]
    results = []
    for checkpoint, directory in zip(checkpoints, directories, strict=True):
        result = evaluate_core(labels.get(checkpoint, str(checkpoint)), directory, read, device, precision)
        results.append(result.record() | {"checkpoint": str(checkpoint), **label_of(checkpoint, labels)})
        for line in result.lines():
            print(line)
    if out is not None:
        write_atomically(out, json.dumps(results, indent=2).encode() + b"\n")


def evaluate_core(
    checkpoint: str,
    directory: Path,
    read: Mapping[CoreSet, Sequence[Mapping[str, Any]]],
    device: str = "auto",
    precision: Precision | None = None,
) -> CoreResult:
    """Evaluates the model in `directory` on the given items of each data set; `checkpoint` is its name in the result."""
    torch.set_num_threads(choose_threads(0))
    model = load_policy_on(directory, device, precision=precision).requires_grad_(False)
    tokenizer = Tokenizer.load(directory)
    found: list[SetResult] = []
    before = 0
    with counting("items", sum(map(len, read.values()))) as count:
        for one, items in read.items():
            right = sum(decisions(model, tokenizer, one, items, partial(_count_on, count, before)))
            before += len(items)
            found.append(SetResult(one.name, len(items), right, one.baseline, one.centred(right / len(items))))
    return CoreResult(checkpoint, found, [one.name for one in CORE if one not in read])


def _count_on(count: Callable[[int], None], before: int, done: int) -> None:
    count(before + done)
