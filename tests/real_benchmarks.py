"""Real records of benchmarks, from `shared/eval_data` beside the repository, in the form that the hub has them in.

The tests read a sample of each set; with NMOE_WHOLE_BENCHMARKS=1, as in .ci/long, all of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "shared" / "eval_data"
WHOLE = os.environ.get("NMOE_WHOLE_BENCHMARKS") == "1"
Record = dict[str, Any]


@dataclass(frozen=True)
class RealBenchmark:
    """A file of `DATA`, the hub's dataset that it is a copy of, and how many problems that has."""

    file: str
    hub: str
    convert: Callable[[Record], Record]
    size: int
    split: str = "test"

    def keep(self, directory: Path, count: int | None) -> list[Record]:
        """Writes the first `count` records, or all, below a directory of kept datasets, and returns them."""
        records = [self.convert(json.loads(line)) for line in (DATA / self.file).read_text().splitlines()[:count]]
        (directory / self.hub).mkdir(parents=True, exist_ok=True)
        (directory / self.hub / f"{self.split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        return records


def _gsm8k(one: Record) -> Record:
    return {"question": one["context"], "answer": f"{one['chain_of_thought']}\n#### {one['answer']}"}


def _math(one: Record) -> Record:
    # The copy has no levels; these stand in for them.
    level = f"Level {4 + len(one['answer']) % 2}" if len(one["context"]) % 2 else "Level 2"
    return {"problem": one["context"], "level": level, "type": one["category"], "solution": one["chain_of_thought"]}


def _svamp(one: Record) -> Record:
    return {"question_concat": one["context"], "Answer": one["answer"]}


def _arc(one: Record) -> Record:
    choices = {"label": list("ABCD")[: len(one["choices"])], "text": one["choices"]}
    # CORE's copy has the word with which its prompts begin.
    question = one["query"].removeprefix("Question: ")
    return {"question": question, "choices": choices, "answerKey": choices["label"][one["gold"]]}


REAL = {
    "gsm8k": RealBenchmark("gsm8k_train.jsonl", "openai/gsm8k/main", dict, 7473, "train"),
    "gsm8k_test": RealBenchmark("gsm8k.jsonl", "openai/gsm8k/main", _gsm8k, 1319),
    "math_test": RealBenchmark("math.jsonl", "hendrycks/competition_math", _math, 5000),
    "svamp": RealBenchmark("svamp.jsonl", "ChilleD/SVAMP", _svamp, 300),
    "arc_easy": RealBenchmark("core/arc_easy.jsonl", "allenai/ai2_arc/ARC-Easy", _arc, 2376),
    "arc_challenge": RealBenchmark("core/arc_challenge.jsonl", "allenai/ai2_arc/ARC-Challenge", _arc, 1172),
    "humaneval": RealBenchmark("human_eval.jsonl", "openai/openai_humaneval", dict, 164),
}
"""By packaged environment."""
