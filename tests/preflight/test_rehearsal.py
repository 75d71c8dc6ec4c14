"""The rehearsal of a step, the overlap of problems, and `nmoe preflight` with its exit codes."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_preflight import SHAPE, TABLES, rl

from nmoe import cli
from nmoe.config.commands import RLConfig, SFTConfig
from nmoe.config.loader import load_run_with
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs import golds as golds_module
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.preflight.check import Check
from nmoe.preflight.overlap import overlap
from nmoe.preflight.preflight import refuse_to_start
from nmoe.preflight.rehearsal import rehearse, round_trip, template
from nmoe.recipes.setup import load_tokenizer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Problem, Verdict

SAMPLING = {"max_new_tokens": 40}


def found(tmp_path: Path, **tables: Any) -> dict[str, Check]:
    return {check.name: check for check in rehearse(rl(tmp_path, sampling=SAMPLING, **tables))}


def test_a_run_without_fault(tmp_path: Path) -> None:
    checks = found(tmp_path)
    assert list(checks) == ["tokenizer", "template", "sandbox", "golds", "rewards", "engine and learner", "samples"]
    assert {check.status for name, check in checks.items() if name != "samples"} == {"ok"}
    assert checks["sandbox"].text == "none is needed"
    assert checks["rewards"].text.startswith("twice the same; 1 for the right answer to sort/0, 0 for a wrong one")


def test_what_the_model_samples_is_shown_beside_the_right_answer(tmp_path: Path) -> None:
    """A model with drawn weights does not end."""
    check = found(tmp_path)["samples"]
    assert check.status == "warn"
    right = r"'The answer follows\. \\\\boxed\{\d+\}<\|endoftext\|>'"
    assert re.match(f"4 of 4 samples of sort/0, whose right answer is {right}, are cut at 40 tokens: ", check.text)
    assert check.text.count(" earns 0 (truncated)") == 2
    assert check.text.endswith("(truncated): raise sampling.max_new_tokens, or ask for short answers in `system`")
    # Longer ones may still end: the check's own limit cut them.
    config = rl(
        tmp_path,
        sampling={"max_new_tokens": 300},
        model={"shape": {**SHAPE, "context_tokens": 512}, "tokenizer": "bytes"},
    )
    check = {one.name: one for one in rehearse(config)}["samples"]
    assert (check.status, ", are cut at 128 tokens: " in check.text) == ("ok", True)


class Lossy:
    """A tokenizer whose text comes back in lower case."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids).lower()


def test_a_tokenizer_that_loses_text(tmp_path: Path) -> None:
    config = rl(tmp_path, sampling=SAMPLING)
    tokenizer: Any = load_tokenizer(config.model)
    lossy: Any = Lossy(tokenizer)
    assert (round_trip(tokenizer).status, round_trip(lossy).status) == ("ok", "fail")
    environment = Environment.from_settings(config.environment, tokenizer)
    problem = environment.pool.order.at(0)
    assert template(environment, tokenizer, problem, 40).status == "ok"
    assert template(environment, lossy, problem, 40).text.startswith(f"the prompt of {problem.id} does not have")
    assert template(environment, tokenizer, problem, 8).status == "warn"


def test_a_template_that_reads_another_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rl(tmp_path, sampling=SAMPLING)
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(config.environment, tokenizer)
    monkeypatch.setattr(environment.grader, "answer_text", lambda ids: "something else")
    assert template(environment, tokenizer, environment.pool.order.at(0), 40).text.endswith(
        "does not fit the tokenizer"
    )


def with_reward(tmp_path: Path, replay: bool) -> dict[str, Any]:
    reward = {"type": "function", "name": "odd", "call": "preflight_rewards:odd", "replay": replay}
    environment = {"env_id": "sort", "format": "boxed", "task_pool": {"type": "generated", "task_type": "sort"}}
    return {"environment": {**environment, "rewards": [reward]}}


def test_a_reward_that_differs_for_the_same_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count()
    module: Any = ModuleType("preflight_rewards")
    module.odd = lambda completions, **columns: [float(next(counter)) for _ in completions]
    monkeypatch.setitem(sys.modules, "preflight_rewards", module)
    check = found(tmp_path, **with_reward(tmp_path, replay=True))["rewards"]
    assert check.status == "fail"
    assert "'odd': 0.0" in check.text
    assert "'odd': 2.0" in check.text
    # The right answer then gets 1 + 8 and the wrong one 0 + 9, which is refused for another reason.
    declared = found(tmp_path, **with_reward(tmp_path, replay=False))["rewards"]
    assert declared.text.startswith(
        "twice the same; 9 for the right answer to sort/0, 9 for a wrong one: nothing right"
    )
    module.odd = lambda completions, **columns: [0.5 for _ in completions]
    assert found(tmp_path, **with_reward(tmp_path, replay=True))["rewards"].status == "ok"


def test_rewards_that_want_the_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("preflight_rewards")
    module.odd = lambda completions, **columns: [float(5 * place) for place, _ in enumerate(completions)]
    monkeypatch.setitem(sys.modules, "preflight_rewards", module)
    check = found(tmp_path, **with_reward(tmp_path, replay=True))["rewards"]
    assert (check.status, "nothing right would be learned" in check.text) == ("fail", True)


def test_a_service_that_is_down_leaves_nothing_to_compare(tmp_path: Path) -> None:
    reward = {"type": "http", "name": "svc", "url": "http://127.0.0.1:9/score", "retries": 0}
    settings = {"env_id": "sort", "format": "boxed", "task_pool": {"type": "generated", "task_type": "sort"}}
    checks = found(tmp_path, environment={**settings, "rewards": [reward]})
    why = "grader_error: reward 'svc': http://127.0.0.1:9/score, asked 1 times: connection refused"
    assert (checks["rewards"].status, checks["engine and learner"].status) == ("fail", "fail")
    assert checks["rewards"].text == f"an example answer to sort/0 has no reward: {why}"
    assert checks["engine and learner"].text == f"not compared: no sample can be trained on; {why}"


def test_golds_that_are_not_graded_correct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMOE_GOLDS", str(tmp_path / "golds"))
    records = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pool = {"type": "jsonl", "path": str(tmp_path / "data.jsonl"), "task_type": "math"}
    environment = {"environment": {"env_id": "mine", "format": "boxed", "task_pool": pool}}
    assert found(tmp_path, **environment)["golds"].status == "ok"
    monkeypatch.setenv("NMOE_GOLDS", str(tmp_path / "others"))

    async def wrong(problem: Problem, sandboxes: object) -> Verdict:
        return Verdict("incorrect", 0.0, "exact", "differs")

    monkeypatch.setattr(golds_module, "_verdict", wrong)
    with pytest.raises(UserError, match=r"^4 of 4 gold answers are not graded correct"):
        found(tmp_path, **environment)


def test_a_sampler_at_another_temperature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's log-probabilities are then those of another distribution than the learner's."""
    assert float(found(tmp_path)["engine and learner"].text.split(" by ")[1].split()[0]) < 1e-6
    generate = NativeEngine.samples

    def colder(self: NativeEngine, request: Request) -> Any:
        return generate(self, replace(request, sampling=replace(request.sampling, temperature=0.9)))

    monkeypatch.setattr(NativeEngine, "samples", colder)
    check = found(tmp_path)["engine and learner"]
    assert check.status == "fail"
    assert "off-policy from the start" in check.text


def test_problems_that_are_trained_and_evaluated_on(tmp_path: Path) -> None:
    def pool(name: str, numbers: range) -> dict[str, Any]:
        lines = [json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        pool = {"type": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "task_type": "math"}
        return {"env_id": name, "format": "boxed", "task_pool": pool}

    def config(held_out: range, **keys: Any) -> RLConfig:
        probes = [{"environment": pool("first", range(30, 33))}, {"environment": pool("held_out", held_out)} | keys]
        return rl(tmp_path, environment=pool("training", range(10)), eval=probes)

    def check(held_out: range) -> Check:
        return overlap(config(held_out))

    assert check(range(20, 26)).text == "; ".join(f"none of {n} is among the 10 problems trained on" for n in (3, 6))
    shared = check(range(7, 17))
    assert (shared.status, shared.text.split(",")[0]) == ("fail", "3 of 10 problems are trained on")
    assert "too (first 'what is " in shared.text
    assert shared.text.endswith(
        "take others in eval.1.environment, or set eval.1.allow_trained_on = true, which the results then say"
    )
    # A run refuses them, too, unless its [[eval]] permits them.
    with pytest.raises(UserError, match="held-out problems: 3 of 10 problems are trained on, too"):
        refuse_to_start(config(range(7, 17)))
    permitted = config(range(7, 17), allow_trained_on=True)
    assert (overlap(permitted).status, overlap(permitted).text.split(",")[0]) == (
        "warn",
        "3 of 10 problems are trained on",
    )
    refuse_to_start(permitted)
    assert overlap(rl(tmp_path, eval=[{"every_steps": 10}])).text.startswith("generated problems are split by a hash")


def test_records_that_are_trained_and_evaluated_on(tmp_path: Path) -> None:
    for name, numbers in (("train", range(5)), ("other", range(5, 8)), ("same", range(3, 6))):
        lines = [json.dumps({"prompt": f"{n} + 1 =", "completion": f" {n + 1}"}) + "\n" for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def check(held_out: dict[str, Any], **keys: Any) -> Check:
        tables = {
            "run": {"steps": 10},
            "model": {"path": "base"},
            "records": {"path": str(tmp_path / "train.jsonl")} | held_out,
            "eval": [{"every_steps": 5} | keys],
        }
        return overlap(load_run_with(None, SFTConfig, tables, "test", "run"))

    other, same = ({"held_out_path": str(tmp_path / f"{name}.jsonl")} for name in ("other", "same"))
    assert check(other).text == "none of 3 is among the 5 prompts trained on"
    shared = check(same)
    assert shared.text.startswith(
        f"2 of 3 prompts are trained on, too (first '3 + 1 =', {tmp_path}/same.jsonl:1 and {tmp_path}/train.jsonl:4)"
    )
    assert check(same, allow_trained_on=True).status == "warn"
    (tmp_path / "train.jsonl").unlink()
    assert check({"held_out": 0.2}).text == "records are split by what they ask: no prompt is on both sides", "unread"


def test_problems_of_a_probe_that_records_ask(tmp_path: Path) -> None:
    """As a question or as the whole prompt; case and white space do not count."""
    records = [
        {
            "messages": [
                {"role": "user", "content": "what is 0 + 1?"},
                {"role": "assistant", "content": "What is 5 + 1?"},
            ]
        },
        {"messages": [{"role": "user", "content": " What is\n1 + 1?"}, {"role": "assistant", "content": "2"}]},
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def check(numbers: range) -> Check:
        lines = [json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in numbers]
        (tmp_path / "probe.jsonl").write_text("".join(lines))
        pool = {"type": "jsonl", "path": str(tmp_path / "probe.jsonl"), "task_type": "math"}
        environment = {"env_id": "probe", "format": "boxed", "task_pool": pool}
        tables = {
            "run": {"steps": 10},
            "model": TABLES["model"],
            "records": {"path": str(tmp_path / "records.jsonl")},
            "eval": [{"environment": environment, "every_steps": 5, "max_tokens": 16}],
        }
        return overlap(load_run_with(None, SFTConfig, tables, "test", "run"))

    # What the assistant says is no question: 5 is not counted.
    assert check(range(2, 8)).text == "none of 6 is among the 2 messages trained on"
    shared = check(range(8))
    assert (shared.status, shared.text.split(",")[0]) == ("fail", "2 of 8 problems are trained on")
    assert f"(first 'what is 0 + 1?', probe/0 and {tmp_path}/records.jsonl:1)" in shared.text


CONFIG = """
[run]
steps = 100
directory = "{directory}"
[model]
tokenizer = "bytes"
shape = {{hidden_size = 32, layers = 2, heads = 2, kv_heads = 1, head_dim = 16, intermediate_size = 64, context_tokens = 64}}
[environment]
env_id = "sort"
format = "boxed"
task_pool = {{type = "generated", task_type = "sort"}}
[sampling]
max_new_tokens = 16
"""

Nmoe = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def nmoe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Nmoe:
    """Runs `nmoe` with arguments in this process; returns its exit code, its output and what it said to stderr."""
    (tmp_path / "mine.toml").write_text(CONFIG.format(directory=tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def nmoe(*arguments: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["nmoe", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        said = capsys.readouterr()
        return exit_.value.code, said.out, said.err

    return nmoe


def test_a_configuration_that_can_run(nmoe: Nmoe, tmp_path: Path) -> None:
    # documented: nmoe preflight CONFIG
    code, out, err = nmoe("preflight", "mine.toml", "--optimizer.warmup_steps", "10")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first == "nmoe rl train, run mine"
    assert lines[:3] == [
        "ok    data                 none is read",
        "ok    hub                  nothing is read from it",
        "ok    learning rate        100% of its peak 1e-06 by step 20",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_schedule_that_comes_too_late(nmoe: Nmoe, tmp_path: Path) -> None:
    code, out, _ = nmoe("preflight", "mine.toml", "--optimizer.warmup_steps=90")
    assert code == 2
    assert [line for line in out.splitlines() if not line.startswith(("ok", "warn"))][1].startswith(
        "fail  learning rate        22% of its peak"
    )
    code, out, err = nmoe("rl", "train", "mine.toml", "--optimizer.warmup_steps=90")
    assert (code, out) == (2, "")
    assert err.startswith("error: learning rate: 22% of its peak 1e-06 by step 20, and 30% are wanted")
    assert not (tmp_path / "runs").exists()


def test_the_command_of_a_configuration(nmoe: Nmoe, tmp_path: Path) -> None:
    pairs = '[run]\nsteps = 10\n[model]\npath = "base"\n[records]\npath = "pairs.jsonl"\n'
    (tmp_path / "pairs.toml").write_text(pairs)
    assert nmoe("preflight", "pairs.toml")[1].startswith("nmoe sft, run pairs\n")
    assert nmoe("preflight", "pairs.toml", "--command", "reward")[1].startswith("nmoe reward, run pairs\n")
    assert nmoe("preflight", "pairs.toml", "--preference.beta=0.2")[1].startswith("nmoe dpo, run pairs\n")
    code, _, err = nmoe("preflight", "pairs.toml", "--command=train")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: --command=train: no training command; one of pretrain, sft, dpo")
