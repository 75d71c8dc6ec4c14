"""`nmoe.train_rl` and the rest: what a program passes is what a run does, and what is wrong ends before anything starts."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

import nmoe
from nmoe.api import train
from nmoe.api.environments import environment_table, read_config
from nmoe.config.registry import load_object
from nmoe.engine.api import Engine, Request
from nmoe.errors import UserError
from nmoe.rl.replay_bundle import replay_command
from nmoe.rollout.collector import UserCodeFailedError
from nmoe.text.tokenizer import SMALLEST_VOCABULARY
from nmoe.types import Sample

ROOT = Path(__file__).parents[2]
TINY = {"hidden_size": 16, "layers": 1, "heads": 2, "context_tokens": 64}
SHORT: dict[str, Any] = {
    "run.steps": 2,
    "run.threads": 1,
    "sampling.max_new_tokens": 8,
    "batch.prompts_per_step": 2,
    "batch.group_size": 4,
    "optimizer.learning_rate": 0.01,
}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def vowels(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


class Echo(nmoe.Task):
    """Any answer that begins with the letter of the record counts."""

    def prompt(self, record: Any) -> str:
        return f"Say {record['letter']}."

    def grade(self, record: Any, answer: str) -> bool:
        return answer.startswith(record["letter"])

    def generate(self, rng: Any, difficulty: int) -> dict[str, str]:
        return {"letter": rng.choice("abcdefghij")}


class Count(nmoe.MultiTurnEnv):
    """Says "again" until it was answered `turns` times; each answer earns its share."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def prompt(self) -> str:
        self.said: list[str] = []
        return f"Begin {self.rng.randrange(1000)}."

    def step(self, turn: Any) -> tuple[str | None, float, bool]:
        self.said.append(turn.text)
        return "again", 1 / self.turns, len(self.said) == self.turns


def says(*texts: str) -> Any:
    """A policy by script: the samples of a prompt say the first text, the second, ..., each up to the stop token or the limit.
    Later turns are asked for one by one, so they all say the first."""
    tokenizer = nmoe.Tokenizer.train((), SMALLEST_VOCABULARY)

    def generate(request: Request, engine: Engine) -> list[Sample]:
        samples = []
        for index in range(request.samples):
            ids = [*tokenizer.encode(texts[index % len(texts)]), request.sampling.stop_ids[0]]
            cut = ids[: request.sampling.max_new_tokens]
            samples.append(Sample(cut, [-1.0] * len(cut), [], "stop" if cut == ids else "length"))
        return samples

    return generate


def samples_of(run: nmoe.TrainedRun) -> list[dict[str, Any]]:
    files = sorted((run.path / "samples").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_importing_nmoe_does_not_import_torch() -> None:
    code = (
        "import sys, nmoe; dir(nmoe); assert 'torch' not in sys.modules; nmoe.Task; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert all(getattr(nmoe, name).__module__.startswith("nmoe.") for name in nmoe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'train_lr'"):
        _ = nmoe.train_lr  # type: ignore[attr-defined]


def test_functions_records_and_tables_are_what_the_run_uses() -> None:
    records = [{"prompt": letter, "letter": letter} for letter in "ab"]
    seen: list[list[str]] = []

    def closure(completions: list[str], letter: list[str], **columns: Any) -> list[float]:
        seen.append(letter)
        return [float(text.startswith(one)) for text, one in zip(completions, letter, strict=True)]

    run = nmoe.train_rl(TINY, env=records, rewards=[vowels, closure], config=SHORT)
    assert {tuple(letters) for letters in seen} == {("a",) * 4, ("b",) * 4}
    sample = json.loads(next((run.path / "samples").iterdir()).read_text().splitlines()[0])
    text = sample["text"].removesuffix("<|endoftext|>")
    assert sample["components"]["vowels"] == vowels([text])[0]
    assert sample["components"]["closure"] == float(text.startswith(sample["columns"]["letter"]))
    assert run.path == Path("runs/records")

    def boom(completions: list[str], **columns: Any) -> list[float]:
        raise ValueError("boom")

    with pytest.raises(UserError, match="boom"):
        nmoe.train_rl(TINY, env=records, rewards=[boom], config=SHORT)
    assert "boom" in Path("runs/records-2/failures.jsonl").read_text()
    assert nmoe.train_rl(TINY, env=records, rewards=[vowels], config=SHORT).path == Path("runs/records-2")


def test_a_sample_is_shown_on_the_console_at_the_first_step_and_every_few(capsys: pytest.CaptureFixture[str]) -> None:
    def told(every: int) -> list[str]:
        steps = {"run.steps": 5, "run.show_sample_every": every, "run.name": f"every_{every}"}
        nmoe.train_rl(TINY, env=Echo, config=SHORT | steps, generate_fn=says("\x1b[2Jno"))
        log = Path("runs", f"every_{every}", "log.txt").read_text()
        printed = capsys.readouterr().out
        assert "\x1b" not in printed + log
        assert [line for line in printed.splitlines() if line not in log] == [], "the log has all that is printed"
        return printed.splitlines()

    lines = told(2)
    found = [number for number, line in enumerate(lines) if ", sample 0 of " in line]
    assert [lines[number].split(",")[0] for number in found] == ["step 1", "step 2", "step 4"]
    assert lines[found[0]].endswith(": reward 0 (correctness 0 x 1)")
    assert lines[found[0] + 1] == r"  incorrect: grade returned False; answer '\x1b[2Jno'"
    assert lines[found[0] + 2] == "  prompt:"
    assert lines[found[0] + 3].startswith("    Say ")
    assert lines[found[0] + 4 : found[0] + 6] == ["  completion:", r"    \x1b[2Jno<|endoftext|>"]
    assert not any("sample 0 of" in line for line in told(0))


def test_two_rewards_of_one_name_are_refused() -> None:
    def make(letter: str) -> Any:
        def count(completions: list[str], **columns: Any) -> list[float]:
            return [float(text.count(letter)) for text in completions]

        return count

    with pytest.raises(UserError, match=r"rewards\[1\]\] name = \"count\": is used before"):
        nmoe.train_rl(TINY, env=[{"prompt": "a"}], rewards=[make("a"), make("b")], config=SHORT)
    named = [nmoe.reward(name=f"count_{letter}", weight=2.0)(make(letter)) for letter in "xy"]
    run = nmoe.train_rl(TINY, env=[{"prompt": "a"}], rewards=named, config=SHORT)
    sample = json.loads(next((run.path / "samples").iterdir()).read_text().splitlines()[0])
    text = sample["text"].removesuffix("<|endoftext|>")
    assert sample["components"]["count_x"] == text.count("x"), "each name has its own function"
    assert sample["weights"]["count_y"] == 2.0


def test_a_task_of_ones_own_is_graded_and_held_out() -> None:
    config = {**SHORT, "eval": [{"every_steps": 2, "problems": 3}]}
    run = nmoe.train_rl(TINY, env=Echo, config=config, generate_fn=says("abc", "jot"))
    for sample in samples_of(run):
        record = json.loads(sample["metadata"]["given"])
        assert sample["question"] == f"Say {record['letter']}."
        assert sample["answer"] in ("abc", "jot")
        assert sample["reward"] == float(sample["answer"][0] == record["letter"])
    assert (run.path / "eval").exists(), "generated problems have a split that is never trained on"
    [result, *_] = nmoe.evaluate(run, Echo(), problems=3, max_new_tokens=4)
    assert (result.mode, result.problems) == ("greedy_pass@1", 3)


def test_an_episode_of_ones_own_is_played_turn_by_turn_and_replays() -> None:
    config = {**SHORT, "sampling.max_new_tokens": 40, "monitor.replay_sample_rate": 1.0}
    run = nmoe.train_rl(TINY, env=Count(turns=2), config=config, generate_fn=says("one", "two"))
    for row in samples_of(run):
        assert row["reward"] == pytest.approx(1.0)
        assert row["failure"] == "ok"
        first, last = row["exchanges"]
        assert first["user"] == "again"
        assert last["user"] is None
        assert first["state"] in ({"turns": 2, "said": ["one"]}, {"turns": 2, "said": ["two"]})
        assert last["state"] == {"turns": 2, "said": [first["state"]["said"][0], "one"]}
    bundles = sorted((run.path / "replay").rglob("bundle.json"))
    lines = list(replay_command(bundles[0].parent, None, None, allow_user_code=True))
    assert any(line.startswith("exchanges    2 turns that the task answered") for line in lines)
    assert lines[-1] == "all the same"
    with pytest.raises(UserError, match="task test_train:Count"):
        list(replay_command(bundles[0].parent, None, None, allow_user_code=False))


def test_what_an_episode_earned_before_its_tokens_ran_out_counts() -> None:
    config = {**SHORT, "sampling.max_new_tokens": 10}
    run = nmoe.train_rl(TINY, env=Count(turns=50), config=config, generate_fn=says("one", "a"))
    for row in samples_of(run):
        turns = {"one": 2, "a": 3}[row["exchanges"][0]["state"]["said"][0]]
        assert len(row["exchanges"]) == turns, "4 + 4 + 2 tokens, or 2 + 4 + 4"
        assert row["failure"] == "truncated"
        assert row["reward"] == pytest.approx(turns / 50)


def test_generate_fn_samples_in_place_of_the_engine() -> None:
    asked: list[Request] = []

    async def greedy_first(request: Request, engine: Engine) -> list[Sample]:
        asked.append(request)
        return await engine.generate(request)

    plain = nmoe.train_rl(TINY, env=[{"prompt": "a"}], rewards=[vowels], config=SHORT)
    own = nmoe.train_rl(TINY, env=[{"prompt": "a"}], rewards=[vowels], config=SHORT, generate_fn=greedy_first)
    assert len(asked) >= 4
    assert [row["reward_mean"] for row in own.metrics] == [row["reward_mean"] for row in plain.metrics]
    assert max(row.get("mismatch_abs_max", 0.0) for row in own.metrics) <= 1e-4


def test_a_run_in_a_thread_or_a_notebook_is_the_same_run() -> None:
    def graded() -> list[tuple[str, float]]:
        records = [{"question": "1 + 1 =", "answer": "2"}]
        run = nmoe.train_rl(TINY, env=records, config=SHORT, generate_fn=says("\\boxed{2}", "2"))
        rewards = [("reward", row["reward_mean"]) for row in run.metrics]
        results = nmoe.evaluate(run, env=records, samples=2, temperature=1.0, max_new_tokens=4, allow_trained_on=True)
        return [*rewards, *((result.mode, result.value) for result in results)]

    async def cell() -> list[tuple[str, float]]:
        return graded()

    with ThreadPoolExecutor(1) as thread:
        in_thread = thread.submit(graded).result()
    assert in_thread == asyncio.run(cell()) == graded()


def test_functions_and_tasks_of_one_name_in_two_threads_stay_apart() -> None:
    """Both runs have named their parts before either samples, and neither grades before the other has sampled."""
    both_ask = Barrier(2, timeout=60)

    def run(value: float) -> list[dict[str, Any]]:
        class Always(nmoe.Task):
            def prompt(self, record: Any) -> str:
                return str(value)

            def grade(self, record: Any, answer: str) -> float:
                return value

            def generate(self, rng: Any, difficulty: int) -> dict[str, Any]:
                return {}

        def constant(completions: list[str], **columns: Any) -> list[float]:
            return [-value] * len(completions)

        async def wait_and_say(request: Request, engine: Engine) -> list[Sample]:
            if not waited:
                waited.append(True)
                await asyncio.to_thread(both_ask.wait)
            samples: list[Sample] = says("yes")(request, engine)
            return samples

        waited: list[bool] = []
        config = {**SHORT, "run.name": f"constant_{value}", "run.steps": 1}
        env, rewards = {"task": Always, "env_id": "always"}, [constant]
        return samples_of(nmoe.train_rl(TINY, env=env, rewards=rewards, config=config, generate_fn=wait_and_say))

    with ThreadPoolExecutor(2) as threads:
        for value, samples in zip((0.25, 0.75), threads.map(run, (0.25, 0.75)), strict=True):
            assert {one["task_type"] for one in samples} == {"test_train:Always"}
            assert {(one["question"], one["extras"]["correctness"]) for one in samples} == {(str(value), value)}
            assert {one["components"]["constant"] for one in samples} == {-value}


def test_a_run_leaves_torch_as_it_was() -> None:
    fills: Any = torch.utils.deterministic
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    fills.fill_uninitialized_memory = True
    try:
        nmoe.train_sft(TINY, [{"prompt": "a", "completion": "b"}], config={"run.threads": 1})
        assert torch.get_num_threads() == 2
        assert not torch.are_deterministic_algorithms_enabled()
        assert fills.fill_uninitialized_memory
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        fills.fill_uninitialized_memory = before[2]


@pytest.mark.parametrize(
    ("chosen_by_torch", "expected"),
    [
        (2, 3),  # the program chose the 3
        (3, 2),  # torch did: of 6 cores those of a kind, or one of each two
        (None, 3),
    ],
)
def test_a_run_computes_with_the_threads_that_the_program_gave_torch(
    chosen_by_torch: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(train, "count_of_torch", lambda: chosen_by_torch)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        torch.set_num_threads(3)
        run = nmoe.train_sft(TINY, [{"prompt": "a", "completion": "b"}])
        assert json.loads((run.path / "provenance.json").read_text())["threads"] == expected
        assert f"{expected} threads; idle ones " in (run.path / "log.txt").read_text()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_resumed_run_goes_on_under_its_name_with_the_same_numbers() -> None:
    def train(env: Any, name: str, steps: int, resume: bool = False) -> nmoe.TrainedRun:
        config = {**SHORT, "run.steps": steps, "run.resume": resume, "checkpoint.every_steps": 1}
        config |= {"optimizer.min_lr_ratio": 1.0, "optimizer.warmup_steps": 0} | ({"run.name": name} if name else {})
        return nmoe.train_rl(TINY, env=env, config=config, generate_fn=says("one", "two"))

    def told(run: nmoe.TrainedRun) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in row.items() if "time" not in name and "second" not in name}
            for row in run.metrics
        ]

    env = Count(turns=3)
    whole = train(env, "whole", 4)
    first = train(env, "", 2)
    assert train(env, "", 4, resume=True).path == first.path == Path("runs/Count")
    assert told(nmoe.TrainedRun(first.path)) == told(whole)


def test_parts_of_one_name_in_one_call_stay_apart() -> None:
    def reward() -> Any:
        def count(completions: list[str], **columns: Any) -> list[float]:
            return [1.0] * len(completions)

        return count

    def tool() -> Any:
        def count(text: str) -> int:
            """Counts the letters of a text."""
            return len(text)

        return count

    table = environment_table([{"prompt": "a"}], rewards=[reward()], tools=[tool()])
    assert load_object("reward", table["rewards"][0]["call"])(["a", "b"]) == [1.0, 1.0]
    assert load_object("tool", table["tools"]["use"][0])("three") == 5


@pytest.mark.parametrize("train", [nmoe.train_rl, nmoe.train_sft])
def test_a_schedule_that_comes_too_late_is_refused_as_by_the_commands(train: Any, tmp_path: Path) -> None:
    settings = {"run.steps": 100, "run.directory": str(tmp_path / "runs"), "optimizer.warmup_steps": 90}
    given: dict[str, Any] = {"data": [{"prompt": "a", "completion": "b"}]}
    if train is nmoe.train_rl:
        given = {"env": [{"prompt": "a", "answer": "1"}]}
    shape = {"hidden_size": 16, "layers": 1, "heads": 1, "context_tokens": 4096}
    with pytest.raises(UserError, match=r"^learning rate: 22% of its peak .* optimizer.allow_slow_warmup = true"):
        train(shape, config=settings, **given)
    assert not list((tmp_path / "runs").glob("*/config.toml"))


def test_records_that_another_script_passed_are_named_as_such() -> None:
    with pytest.raises(UserError, match=r"passed:Gone: a script or notebook passed the records.*to a .jsonl file"):
        load_object("pool", "passed:Gone")


def test_records_in_place_of_an_environments_own_keep_its_task() -> None:
    assert (
        environment_table("sort", data=[{"question": "Sort: 21", "answer": "12"}])["task_pool"]["task_type"] == "sort"
    )
    assert environment_table(None, [vowels], data="letters.jsonl")["task"] == "open"


def test_tables_of_a_configuration_are_joined_and_take_paths() -> None:
    run = nmoe.TrainedRun(Path("runs/base"))
    config = {"a.b": {"c": 1}, "a": {"b": {"d": 2}, "e": Path("f")}, "a.b.g": run}
    assert read_config(config) == (None, {"a": {"b": {"c": 1, "d": 2, "g": "runs/base"}, "e": "f"}})


def test_the_decorator_takes_what_train_rl_takes_or_says_why_not() -> None:
    class Judge:
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return vowels(completions)

        def rate(self, completions: list[str], **columns: Any) -> list[float]:
            return vowels(completions)

    judge = nmoe.reward(weight=0.5)(Judge())
    assert environment_table([{"prompt": "a"}], [judge])["rewards"][0]["weight"] == 0.5
    assert nmoe.reward(name="half")(partial(vowels, weight=0.5))(["a"]) == [1.0]
    with pytest.raises(UserError, match="takes no settings; decorate a function that calls it"):
        nmoe.reward(Judge().rate)


def test_a_generate_fn_may_return_tensors() -> None:
    def tensors(request: Request, engine: Engine) -> list[Sample]:
        ids, logprobs = torch.tensor([9, 10]), torch.tensor([-1.0, -0.5])
        return [Sample(ids, logprobs, [], "length", torch.tensor([[9, 1], [10, 9]])) for _ in range(request.samples)]  # type: ignore[arg-type]

    run = nmoe.train_rl(TINY, env=[{"prompt": "a"}], rewards=[vowels], config=SHORT, generate_fn=tensors)
    sample = samples_of(run)[0]
    assert (sample["token_ids"], sample["logprobs"], sample["kept_ids"]) == ([9, 10], [-1.0, -0.5], [[9, 1], [10, 9]])


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (lambda request: None, "not a list of 4 samples"),
        (lambda request: [Sample([9], [-1.0], [0], "length")], "not a list of 4 samples"),
        (lambda request: [Sample([9, 9], [-1.0], [0, 0], "length")] * 4, "2 tokens, 1 log-probabilities"),
        (lambda request: [Sample([9], [0.5], [0], "length")] * 4, "not a finite number of at most 0"),
        (lambda request: [Sample([9], [-0.5], [0], "stop")] * 4, "`stop` means a stop token"),
        (lambda request: ["abc"] * 4, "'abc', not a Sample"),
        (
            lambda request: [Sample([9999], [-0.5], [0], "length")] * 4,
            "a token that is not a whole number from 0 to 263",
        ),
        (lambda request: [Sample(None, [-0.5], [0], "length")] * 4, "has token_ids = None, not a list"),
        (lambda request: [Sample([9.5], [-0.5], [0], "length")] * 4, "a token that is not a whole number"),
        (lambda request: [Sample([9], ["a"], [0], "length")] * 4, "not a finite number of at most 0"),
        (lambda request: [Sample([9], [-0.5], [0.5], "length")] * 4, "a version that is not a whole number"),
        (lambda request: [Sample([9], [-0.5], [0], "done")] * 4, "the finish reason 'done', not one of"),
        (
            lambda request: [Sample([9], [-0.5], [0], "length", [[7, 8]])] * 4,
            "kept_ids that are not .* itself among them",
        ),
        (lambda request: [Sample([9, 9], [-0.5] * 2, [0] * 2, "length", [[9]])] * 4, "kept_ids that are not a list"),
        (
            lambda request: [Sample([9], [-0.5], [0], "length", None, torch.zeros(2, 1, 1))] * 4,
            "routes that are not experts",
        ),
    ],
)
def test_a_generate_fn_that_returns_nonsense_ends_the_run(samples: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        nmoe.train_rl(
            TINY,
            env=[{"prompt": "a"}],
            rewards=[vowels],
            config=SHORT,
            generate_fn=lambda request, engine: samples(request),
        )


class NoGrade:
    def prompt(self, record: Any) -> str:
        return "?"


class NoPrompt(nmoe.Task):
    def grade(self, record: Any, answer: str) -> bool:
        return True


class OneArgument(nmoe.Task):
    def grade(self, answer: str) -> bool:  # type: ignore[override]
        return True


class Wrong(nmoe.Task):
    """Grades by what the record says, to be wrong in any way."""

    returned: Any = None

    def grade(self, record: Any, answer: str) -> Any:
        if self.returned is None:
            raise OSError("the server is down")
        return self.returned


class Nonsense(nmoe.MultiTurnEnv):
    def __init__(self, returned: Any = None) -> None:
        self._returned = returned

    def prompt(self) -> str:
        return "Begin."

    def step(self, turn: Any) -> Any:
        return self._returned


def by(value: Any) -> Wrong:
    task = Wrong()
    task.returned = value
    return task


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"env": 3}, "env = 3 is not an environment"),
        ({"env": []}, "env has no records"),
        ({"env": ["a"]}, "record 0 of env is 'a', not a dict"),
        ({"env": [{"prompt": "a"}]}, "no field 'answer'"),
        ({"env": [{"question": "1 + 1", "answer": None}]}, "answer"),
        ({"env": NoGrade}, "NoGrade.* is not an environment"),
        ({"env": {"env_id": "x", "task": "nmoe.tests:Missing"}}, "importing nmoe.tests failed"),
        ({"env": {"env_id": "x", "task": "sys:Missing"}}, "task sys:Missing: sys has no 'Missing'"),
        ({"env": {"env_id": "x", "task": "leaves:Task"}}, "importing leaves failed: SystemExit: 3"),
        ({"env": NoPrompt, "data": [{"text": "a"}]}, r"NoPrompt has no prompt: define `prompt\(self, record\)`"),
        ({"env": NoPrompt}, "generates no problems"),
        ({"env": OneArgument, "data": [{"prompt": "a"}]}, r"grade\(answer.*it gets 2 arguments"),
        ({"env": [{"prompt": "a"}], "rewards": vowels}, r"is not a list; write rewards=\[...\]"),
        ({"env": [{"prompt": "a"}], "rewards": ["vowels"]}, "'vowels', which is neither a function"),
        ({"env": [{"prompt": "a"}], "rewards": [lambda completions, /: [1.0]]}, "by position alone"),
        (
            {"env": [{"prompt": "a"}], "rewards": [vowels], "config": {"run.stepz": 3}},
            r"\[run\] stepz = 3: unknown key; did",
        ),
        ({"env": [{"prompt": "a"}], "rewards": [vowels], "config": 3}, "config = 3 is neither a file nor a dict"),
        ({"env": [{"prompt": "a"}], "rewards": [vowels], "config": "none.toml"}, "none.toml: no such file"),
        ({"env": [{"prompt": "a"}], "rewards": [vowels], "config": {"run": 3}}, "config: run = 3 is not a table"),
        ({"env": {"env_id": "x", "task_pool": "sort"}}, "task_pool = 'sort' is not a table"),
        ({"env": "sort", "config": {"environment": "add"}}, "environment = 'add', and env names one as well"),
        ({"env": [{"prompt": "a"}], "rewards": [vowels], "tools": [vowels]}, "tool"),
        ({"env": "no_such_environment"}, "nor is there a packaged environment of that name"),
    ],
)
def test_bad_input_ends_with_one_message_before_anything_is_written(arguments: dict[str, Any], said: str) -> None:
    Path("leaves.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError, match=said):
        nmoe.train_rl(TINY, **{"config": SHORT, **arguments})
    assert not list(Path().rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (by(None), r"grade raised OSError: the server is down, at .*test_train.py:\d+"),
        (by(1.5), "grade returned 1.5; a score is between 0 and 1"),
        (by("yes"), "the reward 'yes', not a finite number"),
        (by(float("nan")), "the reward nan, not a finite number"),
        (Nonsense(), r"step returned None, not \(messages, reward, done\)"),
        (Nonsense(("hm", float("inf"), False)), "the reward inf, not a finite number"),
        (Nonsense(("", 0.0, False)), "needs the user's next message"),
        (Nonsense(([{"role": "assistant", "content": "hm"}], 0.0, False)), "needs the user's next message"),
        (Nonsense(("hm", 0.0, "no")), "done = 'no', not True or False"),
    ],
)
def test_a_grade_or_step_that_returns_nonsense_stops_the_run_with_its_sample(env: Any, said: str) -> None:
    data = [{"prompt": "a"}] if isinstance(env, Wrong) else None
    with pytest.raises(UserCodeFailedError, match=said):
        nmoe.train_rl(TINY, env=env, data=data, config={**SHORT, "run.name": "broken"}, generate_fn=says("hello"))
    (line,) = Path("runs/broken/failures.jsonl").read_text().splitlines()
    assert json.loads(line)["failure"] == "grader_error"
    assert json.loads(line)["text"].startswith("hello")


def test_supervised_runs_read_lists_and_end_after_an_epoch() -> None:
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(16)]
    examples = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs]
    tuned = nmoe.train_sft(TINY, examples, config={"run.threads": 1})
    dpo = nmoe.train_dpo(tuned, pairs, config={"run.threads": 1})
    reward = nmoe.train_reward(tuned, pairs, config={"run.threads": 1})
    assert [run.path.name for run in (tuned, dpo, reward)] == ["sft", "dpo", "reward"]
    assert tuned.metrics[0]["loss"] > 0
    assert dpo.metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "policy and reference are one at first"
    assert len(list(Path("runs/data").glob("*.jsonl"))) == 2, "the examples, and the pairs once"
    assert nmoe.generate(dpo, ["1 + 1 ="], samples=2, max_new_tokens=4)[0][1].finish_reason in ("length", "stop")
    with pytest.raises(UserError, match="jsonl:1: the text has a lone surrogate"):
        nmoe.train_sft(TINY, [{"prompt": "a\ud800", "completion": "b"}])
    with pytest.raises(UserError, match="problems = 0, samples = 1, max_new_tokens = 256: each is at least 1"):
        nmoe.evaluate(dpo, "sort", problems=0)
    with pytest.raises(UserError, match="record 1 of data is 3, not a dict"):
        nmoe.train_sft(TINY, [{"prompt": "a", "completion": "b"}, 3])  # type: ignore[list-item]
    with pytest.raises(UserError, match="data has no records"):
        nmoe.train_dpo(TINY, [])


def test_a_model_that_is_not_there_names_the_command_that_fetches_it() -> None:
    with pytest.raises(UserError, match="hf download org/name --local-dir name"):
        nmoe.train_rl("org/name", env=[{"prompt": "a"}], rewards=[vowels], config=SHORT)


def test_a_model_of_the_hub_comes_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = nmoe.train_sft(TINY, [{"prompt": "a", "completion": "b"}] * 4, config={"run.threads": 1})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    shutil.copytree(start.checkpoint, repository / "snapshots" / ("0" * 40))
    [[of_hub]] = nmoe.generate("org/tiny", "a", max_new_tokens=4, temperature=0.0)
    [[of_run]] = nmoe.generate(start.checkpoint, "a", max_new_tokens=4, temperature=0.0)
    assert of_hub == of_run
