"""README.md: its tables are what the measurements say, its curve what a run recorded."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import seeds_table  # noqa: E402
from learning_curve import draw  # noqa: E402

RECORD = {
    "kernels": "native",
    "cpu": "AMD EPYC",
    "rl_steps": 100,
    "cpu_s": 400.4,
    "wall_s": 270.0,
    "mismatch_abs_max": 0.0,
    "threads": 1,
    "kept_every_promise": True,
}


# documented: python scripts/seeds_table.py --write
@pytest.mark.parametrize("name", ["real", "seeds", "recipes"])
def test_the_tables_agree_with_the_measurements(name: str) -> None:
    begin, end = seeds_table.markers(name)
    table = (ROOT / "README.md").read_text().partition(begin)[2].partition(end)[0]
    assert table == seeds_table.blocks()[name], "run: python scripts/seeds_table.py --write"


def test_the_loop_of_the_readme_is_the_example() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block == (ROOT / "examples/rl_loop.py").read_text()


def test_the_table_has_median_range_and_worst() -> None:
    names = [name for _, *both in seeds_table.ROWS for name in both]
    records = [RECORD | dict.fromkeys(names, value) for value in (0.5, 0.25, 0.9)]
    records[1] |= {"kernels": "plain", "rl_steps": 140, "cpu_s": 500.6, "kept_every_promise": False}
    records[2] |= {"mismatch_abs_max": 2e-7, "threads": 2, "wall_s": 150.0}
    table = seeds_table.table(records)
    assert "| correct answers, 3 bases |" in table
    assert "| greedy | 50.0% (25.0% to 90.0%) | 50.0% | 25.0% |" in table
    assert "(2 with this CPU's C++ kernels on AMD EPYC; 1 without C++ kernels on AMD EPYC; 2 on one thread" in table
    assert (
        "RL took 100 to 140 steps, a whole run 400 to 501 CPU seconds; on two threads with C++ kernels 2.5 to 2.5 min"
        in table
    )
    assert "by the clock.\n2 of 3 kept every promise." in table
    assert "at most 2.0e-07 nats apart" in table


def test_a_task_of_the_real_model_has_median_and_worst_and_form_apart() -> None:
    records = [
        RECORD
        | {
            "peak_memory_mb": 5700.0,
            "perplexity_ratio": ratio,
            "problems_t": 200,
            "chance_t": 0.5,
            "base_t": 0.2,
            "trained_t": right,
            "gain_t": right - 0.2,
            "gain_t_low": right - 0.3,
            "gain_t_high": right - 0.1,
            "base_in_form_t": 0.25,
            "trained_in_form_t": 1.0,
            "trained_given_form_t": right,
        }
        for right, ratio in ((0.9, 1.01), (0.8, 1.02), (0.95, 0.99))
    ]
    table = seeds_table.real_table(records)
    assert "| t | 50.0% | 20.0% | 90.0% | 80.0% | +70.0 | +60.0 [+50.0, +70.0] | 25.0% to 100.0% " in table
    assert "| none in form to 90.0% |" in table
    assert "Medians of 3 seeds (3 on 1 thread of AMD EPYC) on 200 held-out problems a task" in table
    assert "400 to 400 CPU seconds and at most 5.7 GB. Perplexity on lambada became 0.990" in table
    assert seeds_table.real_table([]) == ""


def test_a_recipe_has_median_and_worst_of_its_seeds() -> None:
    records = [
        {"recipe": recipe, "seed": seed, field: value, "majority_of_8": value / 2}
        for *_, recipe, field in seeds_table.RECIPES
        for seed, value in enumerate((0.5, 0.25, 0.9))
    ]
    lines = seeds_table.recipes_table(records).splitlines()
    assert len(lines) == 2 + len(seeds_table.RECIPES)
    assert all(line.endswith("| 50.0% | 25.0% | 3 |") for line in lines[2:])
    assert "| sums; a majority vote: 25.0% |" in "\n".join(lines)


# documented: python scripts/learning_curve.py RUN PICTURE.svg
def test_the_curve_shows_training_and_evaluations(tmp_path: Path) -> None:
    rows = [{"step": step, "correctness": step / 4, "format_ok": 0.9} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").write_text("[batch]\nprompts_per_step = 3\ngroup_size = 4\n")
    (tmp_path / "eval").mkdir()
    for step, value in ((0, 0.1), (3, 0.8)):
        result = {"mode": "sampling_pass@1", "dataset": "d", "problems": 9, "value": value, "low": 0.05, "high": 0.85}
        (tmp_path / f"eval/step_{step:06d}.json").write_text(json.dumps({"step": step, "results": [result]}))
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        draw(tmp_path, picture)
    one, two = (picture.read_text() for picture in pictures)
    assert one == two, "the same run gives the same file"
    assert "correct, in training" in one
    assert "RL step (12 samples each)" in one
    assert "correct, held-out problems (95% interval)" in one
    rows[2]["correctness"] = 0.1
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(tmp_path, pictures[1])
    assert pictures[1].read_text() != one
