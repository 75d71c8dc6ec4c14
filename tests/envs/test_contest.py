"""Coding tasks: contest problems and repairs of files."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from tiny_models import DENSE

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.config.packaged import CONFIGS
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.code_fix import MODULE, RUN_TESTS
from nmoe.envs.tasks.contest import Contest, contest_of, memory_mb_of, seconds_of
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.rl.launch import train
from nmoe.rollout.collector import Collector
from nmoe.runs.ledger import read_metrics
from nmoe.sandbox.api import SandboxSetupError
from nmoe.speedrun.fixes import edit_between
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Message, Sampling

CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7\n"}]
PROGRAM = Contest(("1 2\n", "3 4\n"), ("3\n", "7\n"))
CALLS = Contest(([1, 2], [3, 4]), (3, 7), "add")
LISTED = Contest(([1, 2], [3, 4]), ([3], [7]), "add", listed=True)
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def typed(kind: str) -> list[dict[str, Any]]:
    return [{**one, "testtype": kind} for one in CASES]


RECORDS: dict[str, tuple[dict[str, Any], Contest]] = {
    "APPS": ({"input_output": json.dumps(PAIRS)}, PROGRAM),
    "APPS by lines": (
        {"input_output": json.dumps({"inputs": [["1 2", ""], ["3 4", ""]], "outputs": [["3", ""], "7\n"]})},
        PROGRAM,
    ),
    "APPS, calls": (
        {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]})},
        LISTED,
    ),
    "TACO, calls": (
        {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]})},
        CALLS,
    ),
    "LiveCodeBench": (
        {
            "public_test_cases": json.dumps(typed("stdin")[:1]),
            "private_test_cases": packed(json.dumps(typed("stdin")[1:])),
            "metadata": "{}",
        },
        PROGRAM,
    ),
    "LiveCodeBench, plain": (
        {
            "public_test_cases": json.dumps(typed("stdin")[:1]),
            "private_test_cases": json.dumps(typed("stdin")[1:]),
            "metadata": "{}",
        },
        PROGRAM,
    ),
    "LiveCodeBench, calls": (
        {
            "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
            "private_test_cases": packed(json.dumps([{"input": "3\n4", "output": "7", "testtype": "functional"}])),
            "metadata": json.dumps({"func_name": "add"}),
        },
        CALLS,
    ),
    "DeepCoder": ({"tests": json.dumps([{"type": "stdin_stdout", "fn_name": None, **one} for one in CASES])}, PROGRAM),
    "DeepCoder, calls": (
        {
            "tests": [
                {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3},
                {"type": "function_call", "fn_name": "add", "input": [3, 4], "output": 7},
            ]
        },
        CALLS,
    ),
    "DeepCoder of LiveCodeBench": (
        {
            "tests": [
                {"testtype": "functional", "input": "1\n2", "output": "3", "metadata": {"func_name": "add"}},
                {"testtype": "functional", "input": "3\n4", "output": "7", "metadata": {"func_name": "add"}},
            ]
        },
        CALLS,
    ),
    "DeepCoder of TACO": ({"tests": json.dumps(PAIRS)}, PROGRAM),
    "SYNTHETIC-1": (
        {
            "verification_info": json.dumps(
                {"language": "python", "test_cases": [{"type": "stdin_stdout", **one} for one in CASES]}
            )
        },
        PROGRAM,
    ),
    "CodeContests": (
        {
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["3 4\n"], "output": ["7\n"]},
        },
        PROGRAM,
    ),
    "Open-R1": ({"official_tests": CASES, "generated_checker": None}, PROGRAM),
    "verl": ({"reward_model": {"style": "rule", "ground_truth": json.dumps(PAIRS)}}, PROGRAM),
}


@pytest.mark.parametrize("name", RECORDS)
def test_forms_of_records(name: str) -> None:
    record, wanted = RECORDS[name]
    assert contest_of(record) == wanted
    read = TASKS["program"].read_record({"question": "Add.", **record})
    assert read is not None
    question, gold, metadata = read
    assert question.startswith(
        "Add.\n\nWrite a Python program" if not wanted.function else "Add.\n\nWrite the Python function `add`"
    )
    assert gold == ""
    assert json.loads(str(metadata["outputs"])) == list(wanted.outputs)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("unpickled",)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"private_test_cases": packed(Runs())}, "pickle with the opcode .*could run code: store the tests as JSON"),
        ({"private_test_cases": packed(["a", "b"])}, "pickle with the opcode EMPTY_LIST"),
        ({"private_test_cases": packed(3)}, "pickle with the opcode BININT1"),
        ({"private_test_cases": "no base64!"}, "neither JSON nor packed"),
        ({"private_test_cases": base64.b64encode(b"no zlib").decode()}, "neither JSON nor packed"),
        ({"private_test_cases": base64.b64encode(zlib.compress(b"\x80")).decode()}, "no pickle of a text"),
        ({"private_test_cases": packed("no tests")}, "is no JSON"),
        ({"input_output": "{"}, "'input_output' is no JSON"),
        ({"input_output": "[" * 100_000}, "'input_output' is no JSON"),
        ({"input_output": json.dumps({"inputs": ["1"], "outputs": []})}, "no inputs and as many outputs"),
        ({"input_output": json.dumps({"inputs": [1], "outputs": ["1"]})}, "is int, not text"),
        ({"input_output": json.dumps({"inputs": ["1"], "outputs": ["\ud800"]})}, "lone surrogate"),
        ({"input_output": json.dumps({"fn_name": "f", "inputs": [3], "outputs": [4]})}, "arguments of f are int"),
        (
            {"input_output": json.dumps({"fn_name": "f", "inputs": ["[" * 100_000], "outputs": ["4"]})},
            "f is no JSON: arrays",
        ),
        ({"input_output": json.dumps({"fn_name": "f(", "inputs": [[3]], "outputs": [4]})}, "no name of a function"),
        (
            {"tests": [{"input": "1", "output": "2", "type": "interactive"}]},
            "is of type 'interactive', not stdin_stdout",
        ),
        ({"tests": [{"input": "1", "output": "2", "type": "functional"}]}, "names no function"),
        ({"tests": [{"input": "1"}]}, "has no input and output"),
        ({"tests": [*CASES, {"input": [1], "output": 2, "fn_name": "f"}]}, "of several kinds: f, standard input"),
        ({"tests": 3}, "holds int, not tests"),
        ({"tests": []}, "no tests in any of the fields input_output, tests, public_test_cases"),
        ({"tests": [{"input": "1", "output": " \n"}]}, "expect no output"),
        ({"tests": [{"input": "1" * (9 << 20), "output": "1"}]}, "no test has less than 8 MB"),
        ({"tests": CASES, "generated_checker": "import sys"}, "several outputs are right"),
        ({"tests": CASES, "input_file": "a.in"}, "reads or writes a file"),
        ({"verification_info": {"language": "cpp", "test_cases": CASES}}, "is for cpp; only Python"),
        ({"verification_info": {"language": "python"}}, "no test_cases"),
    ],
)
def test_records_that_cannot_be_used_are_named(
    record: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=message):
        contest_of(record)
    assert "unpickled" not in capsys.readouterr().out


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.envs.tasks.contest._MAX_UNPACKED", 1 << 20)
    with pytest.raises(UserError, match="unpacks to more than 1 MB"):
        contest_of({"private_test_cases": packed("x" * (2 << 20))})


def test_large_tests_are_left_out_and_counted() -> None:
    large = {"input": "1" * (5 << 20), "output": "1"}
    found = contest_of({"tests": [CASES[0], large, large, CASES[1]]})
    assert (len(found.inputs), found.left_out) == (3, 1)
    assert (found.inputs[0], found.inputs[2]) == PROGRAM.inputs


@pytest.mark.parametrize(
    ("record", "seconds", "memory"),
    [
        ({}, None, None),
        ({"time_limit": "2 seconds", "memory_limit": "256 megabytes"}, 2.0, 256.0),
        ({"time_limit": "0.5", "memory_limit": "1 GB"}, 0.5, 1024.0),
        ({"time_limit": {"seconds": 1, "nanos": 500_000_000}, "memory_limit_bytes": 268_435_456}, 1.5, 256.0),
        ({"time_limit": 3.0, "memory_limit": 64}, 3.0, 64.0),
        ({"time_limit": None, "memory_limit_bytes": 0}, None, None),
    ],
)
def test_limits_of_records(record: dict[str, Any], seconds: float | None, memory: float | None) -> None:
    assert (seconds_of(record), memory_mb_of(record)) == (seconds, memory)


@pytest.mark.parametrize(
    ("record", "seconds", "memory"),
    [
        ({}, 4.0, 512),
        ({"time_limit": 3, "memory_limit": 1024}, 6.0, 1024),
        ({"time_limit": 60, "memory_limit": 9999}, 20.0, 2048),
    ],
)
def test_limits_in_force(record: dict[str, Any], seconds: float, memory: int) -> None:
    read = TASKS["program"].read_record({"question": "Add.", "tests": CASES, **record})
    assert read is not None
    assert (read[2]["seconds"], read[2]["memory_mb"]) == (seconds, memory)


@pytest.mark.parametrize(
    "record", [{"time_limit": "soon"}, {"memory_limit": "1 cow"}, {"tolerance": 2}, {"tolerance": "1e-6"}]
)
def test_limits_that_are_none(record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"field '{next(iter(record))}' is "):
        TASKS["program"].read_record({"question": "Add.", "tests": CASES, **record})


PYTHON2, PYTHON3 = "print 3", "print(3)\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("solutions", json.dumps([PYTHON2, PYTHON3])),
        ("solutions", [f"```python\n{PYTHON3}```"]),
        ("solutions", {"language": [2, 1, 3], "solution": ["int main() {}", PYTHON2, PYTHON3]}),
        ("gold_standard_solution", f"```python\n{PYTHON3}```"),
        ("solution", PYTHON3),
    ],
)
def test_the_gold_is_the_first_solution_in_python_3(field: str, value: object) -> None:
    read = TASKS["program"].read_record({"question": "Three.", "tests": CASES, field: value})
    assert read is not None
    assert read[1] == PYTHON3


@pytest.mark.parametrize(
    ("field", "value"),
    [("question_content", "Add."), ("description", "Add."), ("prompt", [{"role": "user", "content": "Add."}])],
)
def test_the_question_is_found(field: str, value: object) -> None:
    read = TASKS["program"].read_record({field: value, "tests": CASES})
    assert read is not None
    assert read[0].startswith("Add.\n\n")
    with pytest.raises(UserError, match="no text in the fields question, question_content, problem"):
        TASKS["program"].read_record({"tests": CASES})


Play = Callable[[list[list[int]]], Trajectory]


@pytest.fixture
def play(tokenizer: Tokenizer) -> Play:
    """One trajectory on the first problem of the environment, turn by turn."""

    def played(turns: list[list[int]]) -> Trajectory:
        environment = Environment.from_toml("code_fix", tokenizer)
        try:
            runtime = ToolRuntime(environment, SandboxSettings(level="landlock", warm=0))
        except SandboxSetupError as error:
            pytest.skip(f"the landlock level cannot be had here: {error}")

        def script(request: Request, index: int) -> list[int]:
            return turns[int(request.request_id.rpartition("/")[2])]

        with runtime:
            collector = Collector(ScriptedEngine(script), environment, 16000, runtime.sandboxes)  # type: ignore[arg-type]
            problem = environment.pool.order.at(0)
            (group,) = collector.collect([problem], 1, Sampling(6000), (7, "train", 0)).groups
        return group.trajectories[0]

    return played


@pytest.fixture
def fix(tokenizer: Tokenizer) -> tuple[str, str]:
    """The edit that corrects the first problem: what it replaces, and by what."""
    problem = Environment.from_toml("code_fix", tokenizer).pool.order.at(0)
    faulty = json.loads(str(problem.metadata["files"]))[MODULE]
    found = edit_between(faulty, json.loads(problem.gold)[MODULE])
    assert found is not None
    return found


def call(harmony: Harmony, name: str, **arguments: str) -> list[int]:
    message = Message("assistant", json.dumps(arguments), "commentary", recipient=f"functions.{name}")
    return harmony.render_completion([message])


def test_a_fault_is_found_fixed_and_judged_by_hidden_inputs(play: Play, harmony: Harmony, fix: tuple[str, str]) -> None:
    done = harmony.render_completion([Message("assistant", "Done.", channel="final")])
    look, run = call(harmony, "read", path=MODULE), call(harmony, "python", code=RUN_TESTS)
    edited = call(harmony, "edit", path=MODULE, old=fix[0], new=fix[1])
    trajectory = play([look, run, edited, run, done])
    assert [event.failure for event in trajectory.tool_events] == ["ok"] * 4
    assert fix[0] in trajectory.tool_events[0].output
    assert ", not " in trajectory.tool_events[1].output
    assert trajectory.tool_events[3].output == "passed\n"
    grade = trajectory.grade
    assert (grade.failure, grade.extras["correctness"], grade.extras["tool_use_ok"]) == ("ok", 1.0, 1.0)
    # The first stage of the curriculum: the form is what pays.
    assert grade.score == grade.weights["format"] + grade.weights["structure"]
    assert grade.weights["correctness"] == 0


def test_changing_the_tests_fixes_nothing(play: Play, harmony: Harmony) -> None:
    done = harmony.render_completion([Message("assistant", "They pass.", channel="final")])
    spoil = call(harmony, "python", code="open('tests/__init__.py', 'w').write('print(\"passed\")')")
    trajectory = play([spoil, call(harmony, "read", path="tests/__init__.py"), done])
    assert trajectory.tool_events[0].failure == "sandbox_denied"
    assert "from lib.module import" in trajectory.tool_events[1].output
    assert trajectory.grade.extras["correctness"] == 0.0
    assert trajectory.grade.verdict is not None
    assert trajectory.grade.verdict.outcome == "incorrect"


def test_the_packaged_config_runs(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ModelConfig(**(DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 4096}))
    (tmp_path / "base").mkdir()
    save_model(Transformer(shape).initialize(0), tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    overrides = {
        "run.directory": tmp_path,
        "run.steps": 1,
        "optimizer.warmup_steps": 0,
        "model.path": tmp_path / "base",
        "eval": "[]",
        "sampling.max_new_tokens": 4,
        "batch.prompts_per_step": 1,
        "batch.group_size": 2,
        "sandbox.level": "landlock",
        "sandbox.warm": 0,
    }
    config = load_run(CONFIGS / "code_fix.toml", RLConfig, [f"--{key}={value}" for key, value in overrides.items()])
    (row,) = read_metrics(train(config))
    assert (row["step"], row["correctness"]) == (1, 0.0)
