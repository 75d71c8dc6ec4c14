"""CORE (DCLM, arXiv:2406.11794): `nmoe eval CHECKPOINT... core` prints the score of 22 sets, set by set.

Kinds, shots and random baselines are those in DCLM's table, and the rules are nanochat's (`nanochat/core_eval.py`), so that scores
can be set beside its own. Few-shot examples of item i are drawn by `Random(1234 + i)` among the others. Multiple choice takes the
option whose tokens behind the common beginning have the lowest mean loss; a schema takes the context, judged by the tokens before
the common end. In language modelling every token of the continuation must be the most likely one.
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
    """One set: `baseline` is the accuracy of guessing, and `delimiter` separates a question from its answer."""

    name: str
    file: str
    kind: Kind
    shots: int
    baseline: float
    delimiter: str = " "

    def centred(self, accuracy: float) -> float:
        """0 for guessing, 1 for all right."""
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
    """The sets whose files lie, at any depth, in `core/` of the kept datasets. Raises UserError where there is none."""
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
    """Reads at most `most` items of a set, after the shuffle that every harness shares. Raises UserError for an item without the
    fields of its kind, or too few items for the shots."""
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
    """Whether the model is right, item by item; `count` receives the number of items done."""
    right = []
    for item, scored in zip(items, scores(model, tokenizer, one, items), strict=True):
        right.append(_is_right(one, item, scored))
        count(len(right))
    return right


def scores(model: Transformer, tokenizer: Tokenizer, one: CoreSet, items: Sequence[Item]) -> Iterator[list[Likelihood]]:
    """The likelihoods of each item's options; in language modelling of its continuation alone."""
    first, context = beginning(tokenizer), model.config.context_tokens

    def asked() -> Iterator[list[Continuation]]:
        for index in range(len(items)):
            texts = prompts(one, items, index)
            sequences = [[*first, *tokenizer.encode(text)] for text in texts]
            yield [cut(found, context) for found in continuations(one, sequences)]

    return likelihoods(model, asked())


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The token that begins a document: the tokenizer's BOS token, else its end of text; empty if it has neither."""
    for name in (tokenizer.named_tokens.get("bos_token"), END_OF_TEXT):
        if name is not None and tokenizer.has_special(name):
            return [tokenizer.special_id(name)]
    return []


def prompts(one: CoreSet, items: Sequence[Item], index: int) -> list[str]:
    """The texts of an item: one for each option; in language modelling without and with the continuation."""
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
    """The tokens to score in an item's texts."""
    if one.kind == "schema":
        suffix = common_prefix([sequence[::-1] for sequence in sequences])
        return [Continuation(sequence, max(1, len(sequence) - suffix)) for sequence in sequences]
    start = max(1, common_prefix(sequences))
    return [
        Continuation(sequence, start) for sequence in (sequences[1:] if one.kind == "language_modeling" else sequences)
    ]


def cut(found: Continuation, context: int) -> Continuation:
    """Cuts the beginning of a text that is longer than the model's context."""
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
    """The result on one set: right items, and the accuracy centred on its baseline."""

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
    """The results of one checkpoint; `missing` are the sets that are not on this machine."""

    checkpoint: str
    sets: Sequence[SetResult]
    missing: Sequence[str]

    @property
    def name(self) -> str:
        """CORE with all sets, else CORE with their number: means over different sets are different scores."""
        return f"CORE-{len(self.sets)}" if self.missing else "CORE"

    @property
    def score(self) -> float:
        """The mean of the centred accuracies."""
        return sum(one.centred for one in self.sets) / len(self.sets)

    @property
    def interval(self) -> Interval:
        """The 95% interval of the score. Centring is linear in a set's accuracy, so the score is so in their mean, weighted by what
        centring multiplies each with."""
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
    checkpoints: Sequence[Path], items: int | None, device: str, out: Path | None, precision: Precision | None = None
) -> None:
    """Prints the score of each checkpoint, and writes them to `out` as JSON. Takes at most `items` of a set, 500 by default.

    Raises UserError where no set is found, for an item without its fields, and for a checkpoint that cannot be loaded.
    """
    if out is not None and out.is_dir():
        raise UserError(f"{out}: is a directory; --out names a file to write")
    read = {one: read_set(one, path, items or ITEMS) for one, path in find_sets().items()}
    directories = [resolve_checkpoint(one) for one in checkpoints]
    results = []
    for checkpoint, directory in zip(checkpoints, directories, strict=True):
        result = evaluate_core(str(checkpoint), directory, read, device, precision)
        results.append(result)
        for line in result.lines():
            print(line)
    if out is not None:
        write_atomically(out, json.dumps([one.record() for one in results], indent=2).encode() + b"\n")


def evaluate_core(
    checkpoint: str,
    directory: Path,
    read: Mapping[CoreSet, Sequence[Mapping[str, Any]]],
    device: str = "auto",
    precision: Precision | None = None,
) -> CoreResult:
    """The result of the model in `directory` on these sets."""
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
