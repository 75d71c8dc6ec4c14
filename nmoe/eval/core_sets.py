"""The 22 sets of CORE (DCLM, arXiv:2406.11794): kinds, shots and random baselines of DCLM's table, and the files they lie in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmoe.data.copies import kept_datasets
from nmoe.data.rows import read_rows
from nmoe.errors import UserError

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
# The order is that of nanochat's table.
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
    """At most that many items, after the shuffle that every harness shares. Raises UserError for an item without the fields of
    its kind, or too few items for the shots."""
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
        return f"an item of {one.name} needs 'gold', the place of one of its {len(given)} options, not {gold!r}"
    return None
