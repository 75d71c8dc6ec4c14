"""The packaged benchmarks on real records in the hub's form: every prompt is rendered, every gold is accepted.

A sample of each set; with NMOE_WHOLE_BENCHMARKS=1, as in .ci/long, all of it. That every gold also scores through an evaluation is
measured by benchmarks/golds.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_benchmarks import DATA, REAL, WHOLE, Record

from nmoe.config.loader import load_environment
from nmoe.config.packaged import packaged_environment
from nmoe.envs.environment import Environment
from nmoe.envs.golds import check_golds
from nmoe.errors import UserError
from nmoe.text.tokenizer import Tokenizer

# That of HumanEval needs sandboxes: tests/sandbox/test_humaneval.py.
WITHOUT_SANDBOX = [name for name in REAL if name != "humaneval"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the answer is"] * 3, 300)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "kept"))
    monkeypatch.setenv("NMOE_GOLDS", str(tmp_path / "golds"))
    return tmp_path / "kept"


def keep(kept: Path, name: str, count: int | None) -> list[Record]:
    if not DATA.exists():
        pytest.skip("shared/eval_data is not beside the repository")
    return REAL[name].keep(kept, count)


@pytest.mark.parametrize("name", WITHOUT_SANDBOX)
def test_every_prompt_is_rendered_and_every_gold_accepted(name: str, kept: Path, tokenizer: Tokenizer) -> None:
    records = keep(kept, name, None if WHOLE else 40)
    demo = Environment.from_toml(packaged_environment(name), tokenizer)
    assert demo.pool.size == len(records) == (REAL[name].size if WHOLE else 40)
    problems = [demo.pool.order.at(place) for place in range(len(records))]
    asked = {str(one[next(iter(one))]) for one in records}
    for problem in problems:
        text = tokenizer.decode(demo.prompts.ids(problem))
        assert problem.question in text
        assert any(problem.question.startswith(question) for question in asked)
    check_golds(demo, None, print)
    graded = [line for file in (kept.parent / "golds").glob("*.txt") for line in file.read_text().split()]
    assert 0 < len(graded) <= len(records)


def test_the_hard_part_of_math_has_levels_4_and_5_alone(kept: Path, tokenizer: Tokenizer) -> None:
    records = keep(kept, "math_test", 60)
    demo = Environment.from_toml(packaged_environment("math_hard"), tokenizer)
    hard = [place for place, one in enumerate(records) if one["level"] in ("Level 4", "Level 5")]
    problems = [demo.pool.order.at(place) for place in range(len(hard))]
    assert demo.pool.size == len(hard) < 60
    assert sorted(int(problem.metadata["record"]) for problem in problems) == hard
    assert {problem.metadata["level"] for problem in problems} == {"Level 4", "Level 5"}
    for one in records:
        one["level"] = 3
    (kept / REAL["math_test"].hub / "test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    with pytest.raises(UserError, match="no record of level 4 or 5; a task pool needs at least one problem"):
        Environment.from_toml(packaged_environment("math_hard"), tokenizer)


@pytest.mark.parametrize(
    "name", ["aime_2024", "aime_2025", "apex", "apex_shortlist", "mmlu", "mbpp_test", "humaneval", "svamp"]
)
def test_what_is_not_here_is_refused_with_the_command_that_fetches_it(
    name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = packaged_environment(name)
    dataset = load_environment(path).task_pool.dataset  # type: ignore[union-attr]
    with pytest.raises(UserError, match=f"nmoe data download {dataset}"):
        Environment.from_toml(path, tokenizer)
