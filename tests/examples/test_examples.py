"""The examples, run as their readers run them but shorter, with the values and line counts that they promise; the notebook, too.

Beside each bound is the worst value of three seeds at that length.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import tokenize
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(request.param)


def code_lines(source: str) -> set[int]:
    """The lines with code: no blank ones, no comments, no docstrings."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def lines_of_class(module: ModuleType, name: str) -> int:
    source = Path(str(module.__file__)).read_text()
    [node] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    return len(code_lines(source) & set(range(node.lineno, (node.end_lineno or 0) + 1)))


def test_code_lines_are_counted_without_comments_and_docstrings() -> None:
    assert code_lines('"""Text\nof two lines."""\n\n# why\nx = (\n    1  # one\n)\n') == {5, 6, 7}


def test_each_example_says_how_it_is_run() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 10
    for script in scripts:
        said = ast.get_docstring(ast.parse(script.read_text())) or ""
        of_server = "nmoe serve RUN_OR_CHECKPOINT" in said and f" examples/{script.name} " in said
        assert f"    python examples/{script.name}   " in said or of_server


# documented: python examples/rl_loop.py
@pytest.mark.parametrize("example", ["rl_loop"], indirect=True)
def test_forty_lines_on_the_primitives_learn(example: ModuleType) -> None:
    rewards = list(example.train(steps=60))
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.8  # 0.91
    assert len(code_lines(Path(str(example.__file__)).read_text())) <= 40


# documented: python examples/own_reward.py
@pytest.mark.parametrize("example", ["own_reward"], indirect=True)
def test_a_function_of_ones_own_is_learned(example: ModuleType) -> None:
    run = example.main(steps=30)
    assert run.metrics[0]["reward/share"] < 0.1
    assert run.metrics[-1]["reward/share"] > 0.2  # 0.36; 0.99 after the 60 steps of the example
    assert run.metrics[-1]["reward_mean"] == pytest.approx(run.metrics[-1]["reward/share"]), "nothing else is rewarded"
    sample = json.loads((run.path / "samples/step_000030.jsonl").read_text().splitlines()[0])
    fits = {"letters": str.isupper, "digits": str.isdigit}[sample["columns"]["kind"]]
    text = sample["text"].removesuffix("<|endoftext|>")
    assert sample["components"]["share"] == sum(map(fits, text)) / max(len(text), 1)
    assert sample["trainer_state"] == {"global_step": 29, "max_steps": 30}


# documented: python examples/own_environment.py
@pytest.mark.parametrize("example", ["own_environment"], indirect=True)
def test_a_task_of_ones_own_is_learned(example: ModuleType) -> None:
    run = example.main(steps=40)
    assert run.metrics[0]["correctness"] < 0.02
    assert run.metrics[-1]["correctness"] > 0.15  # 0.30; 0.99 after 60
    assert lines_of_class(example, "Greater") <= 20


# documented: python examples/tool_turns.py
@pytest.mark.parametrize("example", ["tool_turns"], indirect=True)
def test_a_tool_of_ones_own_is_called(example: ModuleType) -> None:
    run = example.main(steps=8)
    first, last = run.metrics[0], run.metrics[-1]
    assert last["tool_use_ok"] > first["tool_use_ok"] + 0.12  # 0.28
    assert last["correctness"] > first["correctness"] + 0.1  # 0.20
    assert last["turns_mean"] == pytest.approx(1 + last["tool_calls_mean"], abs=0.1), "a call, then the answer"


# documented: python examples/multi_turn.py
@pytest.mark.parametrize("example", ["multi_turn"], indirect=True)
def test_an_episode_of_ones_own_is_learned(example: ModuleType) -> None:
    run = example.main(steps=60)
    assert run.metrics[0]["correctness"] < 0.02
    assert run.metrics[-1]["correctness"] > 0.2  # 0.38; 1.00 after 120
    assert run.metrics[-1]["turns_mean"] > 1.15, "some games have a second guess"
    assert lines_of_class(example, "Guess") <= 20


# documented: python examples/sft_then_dpo.py
@pytest.mark.parametrize("example", ["sft_then_dpo"], indirect=True)
def test_the_margin_of_the_preferred_answer_rises(example: ModuleType) -> None:
    base, tuned = example.main()
    margins = [row["rewards/margins"] for row in tuned.metrics]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[-1] > 0.05  # 0.083
    assert tuned.metrics[-1]["rewards/accuracies"] == 1
    assert example.share(tuned) > example.share(base)  # 0.63 against 0.48


# documented: python examples/run_sft.py
@pytest.mark.parametrize("example", ["run_sft"], indirect=True)
def test_fine_tuning_as_one_call(example: ModuleType) -> None:
    run = example.main(epochs=60.0)
    assert run.metrics[0]["loss"] > 5
    assert run.metrics[-1]["loss"] < 0.3  # 0.22 after 40 epochs, below 0.01 after 100
    assert len(code_lines(Path(str(example.__file__)).read_text())) <= 30


# documented: python examples/run_rl.py
@pytest.mark.parametrize("example", ["run_rl"], indirect=True)
def test_reinforcement_learning_as_one_call(example: ModuleType) -> None:
    run = example.main(steps=30)
    assert run.metrics[0]["reward_mean"] < 0.1
    assert run.metrics[-1]["reward_mean"] > 0.2  # 0.35; 0.86 after the 60 steps of the example
    assert len(code_lines(Path(str(example.__file__)).read_text())) <= 40


NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"


def test_the_notebook_trains_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "a notebook is committed without its outputs"
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell.replace("STEPS = 60", "STEPS = 20"), NOTEBOOK.name, "exec"), names)
    rewards, mismatches = (axis.lines[0].get_xydata() for axis in names["figure"].axes)
    assert rewards[:, 1].tolist() == [row["reward_mean"] for row in names["run"].metrics]
    assert rewards[-1, 1] > 2 * rewards[0, 1]
    assert mismatches.shape == (20, 2)
    assert (mismatches[:, 1] < 1e-5).all()
    (answer,) = eval(compile("[" + cells[-1] + "]", NOTEBOOK.name, "eval"), names)
    assert len(answer) == 2
