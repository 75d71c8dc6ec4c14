"""One commit's side of benchmarks/compare_commits.py: the benchmarks that lie in that commit's own tree, each a second or so."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from side import answer

SEQUENCES = 32
ANSWERS = 8_000
STARTS = 3
HELP = [sys.executable, "-c", "import sys; sys.argv = ['nmoe', '--help']; from nmoe.cli import main; main()"]

Work = Callable[[int], Any]
"""What is timed; it takes the number of the round, so that no round finds another's prompts in a cache."""


def works(checkpoint: Path) -> dict[str, Work]:
    """The pieces of work by name. Imports the benchmarks, which have to be on the path."""
    import nmoe_grpo
    import rollouts
    from decode_workload import Run
    from grpo_workload import CASES
    from nmoe_decode import NmoeDecode

    decode, grpo = NmoeDecode(checkpoint), nmoe_grpo.NmoeGrpo()
    return {
        "start-up": lambda number: [subprocess.run(HELP, check=True, stdout=subprocess.DEVNULL) for _ in range(STARTS)],
        "decode": lambda number: decode.generate(Run("fp32", SEQUENCES, 1000 + number)),
        **_training(),
        "grpo_step": lambda number: grpo.step(CASES[1].lengths(number)),
        "grading": _grading(),
        "episodes": lambda number: rollouts.episode_overhead(1),
    }


def _training() -> dict[str, Work]:
    from nmoe_sft import NmoeSft
    from sft_workload import CASES, Case

    def training(case: Case) -> Work:
        side = NmoeSft(case)
        return lambda number: side.step(case.rows(number))

    return {f"learner_{case.name}": training(case) for case in CASES}


def _grading() -> Work:
    """Answers that need no worker: what one does is math-verify's time."""
    import grading

    rng = random.Random(0)
    makers = [grading.integer, grading.integer, grading.decimal, grading.fraction, grading.structure, grading.unit]
    work = [makers[place % len(makers)](rng) for place in range(ANSWERS)]
    return lambda number: grading.run_nmoe(work, True)


def cpu_s() -> float:
    """Processor seconds of this process and of the subprocesses that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def serve(connection: Connection, tree: Path, checkpoint: Path) -> None:
    """Names the works of the benchmarks in `tree`, then answers a name and a round's number with the CPU seconds that it took."""
    sys.path.insert(0, str(tree / "benchmarks"))
    named = works(checkpoint)
    connection.send(list(named))

    def timed(question: tuple[str, int]) -> float:
        name, number = question
        began = cpu_s()
        named[name](number)
        return cpu_s() - began

    answer(connection, timed)
