"""Evaluates whole benchmarks with an engine that answers every problem with its gold, and once with a wrong answer.

    python benchmarks/golds.py > benchmarks/results/golds.json

All that `nmoe eval` does but the model: every prompt is rendered and asked for, every completion is read and graded, with
HumanEval's in sandboxes. The golds must score 100%, the others 0%. The records are those of ../shared/eval_data.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

from nmoe.config.packaged import packaged_environment
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.evaluate import distinct_problems, evaluate
from nmoe.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from real_benchmarks import REAL
from scripted_engine import ScriptedEngine

CONTEXT = 2**16


def measure(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """One benchmark, answered with its golds and with wrong answers."""
    environment = Environment.from_toml(packaged_environment(name), tokenizer)
    start = environment.state()
    size = environment.pool.order.size or 0
    problems = distinct_problems(environment, size)
    prompts = [tuple(environment.prompts.ids(problem)) for problem in problems]
    began = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    row: dict[str, Any] = {"benchmark": name, "problems": size, "distinct": len(problems)}
    row["longest_prompt"] = max(map(len, prompts))
    for which, kind in enumerate(("golds", "wrong_answers")):
        answers = {
            ids: environment.grader.answer_ids(problem, TASKS[problem.task_type].example_answers(problem)[which])
            for ids, problem in zip(prompts, problems, strict=True)
        }
        assert len(answers) == len(problems), "two problems have one prompt"

        def script(request: Request, _: int, known: dict[tuple[int, ...], list[int]] = answers) -> list[int]:
            return known[tuple(request.prompt_ids)]

        environment.load_state(start)
        engine = ScriptedEngine(script)
        with ToolRuntime(environment, SandboxSettings()) as runtime:
            result = evaluate(
                engine,
                environment,
                CONTEXT,
                problems=size,
                samples=1,
                temperature=0.0,
                max_new_tokens=CONTEXT // 2,
                seed=0,
                runtime=runtime,
            )[0]
        assert len(engine.requests) == result.problems == len(problems), "a problem was not asked for"
        row[f"{kind}_scored_right"] = round(result.value * result.problems)
    ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    used = sum(b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(began, ended, strict=True))
    print(row, file=sys.stderr, flush=True)
    return row | {"cpu_s": round(used, 1)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tokenizer = Tokenizer.train(["the answer is"] * 3, 300)
    with tempfile.TemporaryDirectory() as kept:
        os.environ["NMOE_DATASETS"] = kept
        for benchmark in REAL.values():
            benchmark.keep(Path(kept), None)
        rows = [measure(name, tokenizer) for name in REAL]
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine(), "benchmarks": rows}, indent=1))


if __name__ == "__main__":
    main()
