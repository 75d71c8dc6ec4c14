"""`nmoe eval CHECKPOINT... core`: the score of CORE, set by set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nmoe.config.listing import columns
from nmoe.cores import choose_threads
from nmoe.errors import UserError
from nmoe.eval.core import decisions
from nmoe.eval.core_sets import CORE, CoreSet, find_sets, read_set
from nmoe.model.policy import load_policy_on
from nmoe.runs.progress import counting
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import write_atomically
from nmoe.statistics import Interval, binomial_interval, stratified_share
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Precision

ITEMS = 500


@dataclass(frozen=True)
class SetResult:
    """How many items of a set were right, and the score above its baseline."""

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
