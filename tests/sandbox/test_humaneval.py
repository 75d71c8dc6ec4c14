"""HumanEval's real problems in sandboxes: canonical solutions pass and prompts alone fail.

A sample of them; with NMOE_WHOLE_BENCHMARKS=1, as in .ci/long, all 164.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from boxes import sandboxes_of
from real_benchmarks import DATA, REAL, WHOLE

from nmoe.config.packaged import packaged_environment
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.runs.waiting import all_or_none
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Problem, Verdict


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Those of the packaged environment, read as the hub has them from a local copy."""
    if not DATA.exists():
        pytest.skip("shared/eval_data is not beside the repository")
    REAL["humaneval"].keep(tmp_path, None if WHOLE else 11)
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path))
    tokenizer = Tokenizer.train(["the answer is"] * 3, 300)
    demo = Environment.from_toml(packaged_environment("humaneval"), tokenizer)
    size = demo.pool.order.size or 0
    assert size == (164 if WHOLE else 11)
    read = [demo.pool.order.at(place) for place in range(size)]
    assert all(str(one.metadata["prompt"]).strip("\n") in tokenizer.decode(demo.prompts.ids(one)) for one in read)
    return read


def test_canonical_solutions_pass_and_prompts_alone_fail(problems: Sequence[Problem]) -> None:
    """A solution as the whole function and as the rest of its prompt, which is how the dataset has it."""
    boxes = sandboxes_of("bubblewrap", warm=2)
    task = TASKS["humaneval"]

    def answers(problem: Problem) -> dict[str, str]:
        prompt = str(problem.metadata["prompt"])
        whole = f"```python\n{problem.gold}\n```"
        return {"whole": whole, "rest": problem.gold.removeprefix(prompt), "prompt": prompt}

    async def judged() -> list[tuple[str, str, Verdict]]:
        waiting = iter([(problem, form, text) for problem in problems for form, text in answers(problem).items()])
        found: list[tuple[str, str, Verdict]] = []

        async def one_after_another() -> None:
            for problem, form, text in waiting:
                found.append((problem.id, form, await task.verify(problem, Attempt(text, None, (), boxes))))

        try:
            await all_or_none([one_after_another() for _ in range(2)])
        finally:
            await boxes.close()
        return found

    found = asyncio.run(judged())
    wanted = {"whole": "correct", "rest": "correct", "prompt": "incorrect"}
    assert [one for one in found if one[2].outcome != wanted[one[1]]] == []
    counted = Counter((form, verdict.outcome) for _, form, verdict in found)
    assert counted == {(form, outcome): len(problems) for form, outcome in wanted.items()}
