"""Replay bundles: what was recorded comes out the same again, and whatever was changed since is found and named."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_environment, parse
from nmoe.config.locate import Locator, Place
from nmoe.config.packaged import ENVIRONMENTS
from nmoe.envs.environment import Environment, identity_of
from nmoe.errors import StorageError, UserError
from nmoe.rollout.bundle import FILE, read_bundle, write_bundle
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import Check, replay
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Message, Problem, Sample, Sampling, Turn

Make = Callable[..., Environment]

ENVIRONMENT = """
version = "4"
system = "Sort."
[task_pool]
type = "generated"
task_type = "sort"
difficulty = [3, 3]
[curriculum]
[[curriculum.stages]]
name = "first"
weights = { format = 0.5, correctness = 1.0 }
"""
PROBLEM = Problem("demo/0", "sort", "Sort: 312", "123", "demo", {"difficulty": 3})
LIMIT = 60


def trajectory_of(
    environment: Environment,
    token_ids: list[int],
    finish_reason: Any = "stop",
    problem: Problem = PROBLEM,
    index: int = 0,
    seed: int = 7,
    **columns: Any,
) -> Trajectory:
    rng = random.Random(repr(token_ids))
    logprobs = [-rng.random() * 5 for _ in token_ids]
    sample = Sample(token_ids, logprobs, [3] * len(token_ids), finish_reason, **columns)
    turns = (Turn((), sample),)
    return Trajectory(
        problem=problem,
        index=index,
        prompt_ids=tuple(environment.prompts.ids(problem)),
        turns=turns,
        grade=asyncio.run(environment.grader.grade(problem, turns, LIMIT)),
        sampling=Sampling(LIMIT, 0.7, 0.9, 5, environment.renderer.stop_ids, seed),
        environment=environment.identity,
        model={"start": "seed 1", "numerics": "fast", "precision": "float32"},
    )


def recorder(directory: Path, environment: Environment, tokenizer: Tokenizer, **options: Any) -> ReplayRecorder:
    directory.mkdir(exist_ok=True)
    return ReplayRecorder(
        directory, environment, tokenizer, **{"seed": 0, "sample_rate": 1.0, "per_failure": 1, **options}
    )


def checks(path: Path, tokenizer: Tokenizer) -> list[Check]:
    async def run() -> list[Check]:
        return [check async for check in replay(read_bundle(path), tokenizer)]

    return asyncio.run(run())


def differences(path: Path, tokenizer: Tokenizer) -> dict[str, str]:
    return {check.name: check.difference for check in checks(path, tokenizer) if check.difference is not None}


@pytest.fixture
def bundle(environment: Make, tokenizer: Tokenizer, harmony: Harmony, tmp_path: Path) -> Path:
    """A right answer of three messages, with kept sets and routes."""
    demo = environment(ENVIRONMENT)
    turn = [Message("assistant", "1 < 2 < 3", channel="analysis"), Message("assistant", "123", channel="final")]
    ids = harmony.render_completion(turn)
    routes = np.arange(2 * 2 * (len(demo.prompts.ids(PROBLEM)) + len(ids) - 1), dtype=np.int16).reshape(-1, 2, 2)
    trajectory = trajectory_of(demo, ids, kept_ids=[[id_, 3] for id_ in ids], routes=routes)
    assert (trajectory.grade.score, trajectory.grade.failure) == (1.5, "ok")
    (path,) = recorder(tmp_path / "replay", demo, tokenizer).write(12, [trajectory])
    return path


# --- the same again ----------------------------------------------------------------------------------------------------


def test_a_bundle_holds_what_the_trajectory_was(
    bundle: Path, environment: Make, tokenizer: Tokenizer, harmony: Harmony
) -> None:
    assert bundle.name == "step_000012-sampled-demo_0-0-0007"
    read = read_bundle(bundle)
    assert read.altered == ()
    assert read.settings == environment(ENVIRONMENT).settings
    assert read.transcript == [
        [
            asdict(Message("assistant", "1 < 2 < 3", channel="analysis")),
            asdict(Message("assistant", "123", channel="final")),
            {"end": "return", "error": None},
        ]
    ]
    trajectory = read.trajectory()
    ids = trajectory.token_ids
    assert trajectory.problem == PROBLEM
    assert list(trajectory.prompt_ids) == environment(ENVIRONMENT).prompts.ids(PROBLEM)
    assert trajectory.kept_ids == [[id_, 3] for id_ in ids]
    assert trajectory.routes is not None
    assert trajectory.routes.shape == (len(trajectory.prompt_ids) + len(ids) - 1, 2, 2)
    assert trajectory.sampling == Sampling(LIMIT, 0.7, 0.9, 5, harmony.stop_ids, 7)
    assert {name: weight for name, weight in trajectory.grade.weights.items() if weight} == {
        "format": 0.5,
        "correctness": 1.0,
    }
    # Once more through a bundle: nothing is lost.
    again = json.loads((bundle / FILE).read_text())["trajectory"]
    assert json.loads(json.dumps(trajectory.record(12, tokenizer.decode(ids)))) == again
    assert Tokenizer.load(bundle.parent / "tokenizer").fingerprint == tokenizer.fingerprint
    assert [path.name for path in bundle.parent.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_leaves_no_part_of_the_tokenizer(
    environment: Make, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Tokenizer, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "tokenizer.json").write_text("{")
        raise StorageError("no space left")

    demo = environment(ENVIRONMENT)
    trajectory = trajectory_of(demo, tokenizer.encode("123"))
    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "save", full)
        with pytest.raises(StorageError, match="no space left"):
            recorder(tmp_path / "replay", demo, tokenizer).write(12, [trajectory])
    assert os.listdir(tmp_path / "replay") == []
    (path,) = recorder(tmp_path / "replay", demo, tokenizer).write(12, [trajectory])
    assert differences(path, tokenizer) == {}
    assert sorted(os.listdir(tmp_path / "replay")) == [path.name, "tokenizer"]


def test_every_check_agrees(bundle: Path, tokenizer: Tokenizer) -> None:
    found = checks(bundle, tokenizer)
    assert [check.name for check in found] == [
        *("record", "environment", "prompt", "text", "turns", "tools", "grade", "digests")
    ]
    assert [check.difference for check in found] == [None] * len(found)
    prompt = len(read_bundle(bundle).record["prompt_ids"])
    assert str(found[2]) == f"prompt       {prompt} tokens: the same"
    assert found[6].compared == "reward 1.5, correct (exact), ok"


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_completion_replays(
    data: st.DataObject, environment: Make, tokenizer: Tokenizer, harmony: Harmony, tmp_path: Path
) -> None:
    """Well-formed turns, random tokens, halves of characters, forged and absent stops, under every finish reason and both forms."""
    form = data.draw(st.sampled_from(["harmony", "boxed"]))
    demo = environment(f'format = "{form}"\n{ENVIRONMENT}')
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    channel = st.sampled_from(["analysis", "commentary", "final"])
    well_formed = st.lists(st.builds(Message, st.just("assistant"), words, channel), min_size=1, max_size=3)
    ids = data.draw(
        st.one_of(
            well_formed.map(harmony.render_completion),
            st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=LIMIT),
            st.builds(
                lambda answer: demo.grader.answer_ids(PROBLEM, answer), st.sampled_from(["123", "321", "}{", "é☃"])
            ),
        )
    )
    finish = data.draw(st.sampled_from(["stop", "length", "abort"]))
    question = data.draw(st.sampled_from(["Sort: 312", "<|end|>", "ünï 𝄞"]))
    problem = Problem("demo/0", "sort", question, "123", "demo", {})
    (path,) = recorder(tmp_path / "replay", demo, tokenizer).write(
        1, [trajectory_of(demo, ids, finish, problem=problem)]
    )
    assert differences(path, tokenizer) == {}


EVERYTHING = """
env_id = "everything"
format = "chat"
[task_pool]
type = "mixture"
[[task_pool.sources]]
name = "legs"
weight = 1
type = "reasoning_gym"
dataset = "leg_counting"
config = { min_animals = 2, nested = { list = [1, 2.5, "a"] } }
[[task_pool.sources]]
name = "sort"
weight = 0.3
type = "generated"
task_type = "sort"
difficulty = [1, 2]
[tools]
use = ["python", "my.tools:add"]
[workspace]
repository = "clone"
base_commit = "abc"
max_age_days = 0.5
[rubric]
tool_use = 1e-7
"""


@pytest.mark.parametrize("path", [None, *sorted(ENVIRONMENTS.glob("**/*.toml"))], ids=lambda path: path and path.stem)
def test_settings_come_back_from_a_bundle_as_they_were(path: Path | None, tmp_path: Path) -> None:
    if path is None:
        path = tmp_path / "everything.toml"
        path.write_text(EVERYTHING)
    before = load_environment(path)
    stored = json.loads(json.dumps(before.model_dump(mode="json")))
    after = parse(stored, EnvironmentSettings, Locator(Place("bundle")))
    assert after == before
    assert identity_of(after) == identity_of(before)


# --- what was changed --------------------------------------------------------------------------------------------------


def tamper(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((path / FILE).read_text())
    change(content)
    (path / FILE).write_text(json.dumps(content))


def test_any_one_token_that_was_changed_is_found_by_its_place(bundle: Path, tokenizer: Tokenizer) -> None:
    original = (bundle / FILE).read_text()
    record = json.loads(original)["trajectory"]
    for key, prefix in (("prompt_ids", "prompt token"), ("token_ids", "token")):
        for place, token_id in enumerate(record[key]):
            (bundle / FILE).write_text(original)
            other = 20 if token_id != 20 else 21
            tamper(
                bundle,
                lambda content, key=key, place=place, other=other: content["trajectory"][key].__setitem__(place, other),
            )
            found = differences(bundle, tokenizer)
            first = next(iter(found.items()))
            assert first[0] == ("prompt" if key == "prompt_ids" else "text")
            assert first[1].startswith(f"{prefix} {place}: "), first
            assert found["digests"] == f"changed since it was written: trajectory.{key}"


@pytest.mark.parametrize(
    ("change", "first", "altered"),
    [
        (
            lambda c: c["trajectory"].update(gold="132"),
            "grade: grade.score: 1.5 in the bundle, 0.5 now",
            "trajectory.gold",
        ),
        (
            lambda c: c["trajectory"]["logprobs"].__setitem__(4, -0.25),
            "digests: changed since it was written: trajectory.logprobs",
            "trajectory.logprobs",
        ),
        (
            lambda c: c["trajectory"]["environment"].update(version="5"),
            "environment: environment.version: '5' in the bundle, '4' now",
            "trajectory.environment",
        ),
        (
            lambda c: c["settings"].update(version="5"),
            "environment: environment.version: '4' in the bundle, '5' now",
            "settings",
        ),
        (
            lambda c: c["settings"].update(system="Sort!"),
            "environment: environment.fingerprint: ",
            "settings",
        ),
        (
            lambda c: c["trajectory"].update(question="Sort: 321"),
            "prompt: prompt token ",
            "trajectory.question",
        ),
        (
            lambda c: c["trajectory"].update(reward=1.0),
            "grade: grade.score: 1.0 in the bundle, 1.5 now",
            "trajectory.reward",
        ),
        (
            lambda c: c["trajectory"].update(failure="truncated"),
            "grade: grade.failure: 'truncated' in the bundle, 'ok' now",
            "trajectory.failure",
        ),
        (
            lambda c: c["trajectory"]["verdict"].update(outcome="incorrect"),
            "grade: grade.verdict.outcome: 'incorrect' in the bundle, 'correct' now",
            "trajectory.verdict",
        ),
        (
            lambda c: c["trajectory"].update(answer="132"),
            "grade: grade.answer: '132' in the bundle, '123' now",
            "trajectory.answer",
        ),
        (
            lambda c: c["trajectory"]["finish_reasons"].__setitem__(0, "length"),
            "grade: grade.score: 1.5 in the bundle, 0.0 now",
            "trajectory.finish_reasons",
        ),
        (
            lambda c: c["trajectory"]["weights"].update(format=0.25),
            "grade: grade.score: 1.5 in the bundle, 1.25 now",
            "trajectory.weights",
        ),
        (
            lambda c: c["transcript"][0][1].update(content="132"),
            "turns: turn 0, message 1: {'role': 'assistant', 'content': '132'",
            "transcript",
        ),
        (
            lambda c: c["trajectory"]["versions"].__setitem__(2, 9),
            "digests: changed since it was written: trajectory.versions",
            "trajectory.versions",
        ),
        (
            lambda c: c["trajectory"]["mask"].__setitem__(2, 0),
            "record: token 2: the mask says 0, and its span something else",
            None,
        ),
        (lambda c: c["trajectory"]["logprobs"].pop(), "record: ", None),
        (lambda c: c["trajectory"]["spans"][0].update(end=3), "record: the spans do not cover the ", None),
        (lambda c: c["trajectory"]["finish_reasons"].append("stop"), "record: the spans do not belong to 2 turns", None),
    ],
)  # fmt: skip
def test_any_part_that_was_changed_is_named(
    bundle: Path, tokenizer: Tokenizer, change: Callable[[dict[str, Any]], None], first: str, altered: str | None
) -> None:
    tamper(bundle, change)
    found = differences(bundle, tokenizer)
    assert ": ".join(next(iter(found.items()))).startswith(first), found
    if altered is not None:
        assert found["digests"] == f"changed since it was written: {altered}"


def test_routes_that_were_changed_or_lost(bundle: Path, tokenizer: Tokenizer) -> None:
    routes = np.load(bundle / "routes.npy")
    routes[1, 1, 0] += 1
    np.save(bundle / "routes.npy", routes)
    assert differences(bundle, tokenizer) == {"digests": "changed since it was written: routes"}
    (bundle / "routes.npy").unlink()
    assert differences(bundle, tokenizer) == {"digests": "changed since it was written: routes"}


def test_what_is_no_bundle_is_refused(bundle: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file.json").touch()
    with pytest.raises(UserError, match=r"file\.json: no replay bundle \(no bundle\.json in it\)"):
        read_bundle(tmp_path / "file.json")
    with pytest.raises(UserError, match=r"no replay bundle \(no bundle\.json in it\)"):
        read_bundle(tmp_path)
    other = Tokenizer.train(["another"] * 5, 300)
    with pytest.raises(UserError, match=r"rendered with the tokenizer .* name the right one with --tokenizer"):
        checks(bundle, other)
    original = (bundle / FILE).read_text()
    for change, message in [
        (lambda c: c.update(nmoe_replay=2), "nmoe_replay is 2, and this nmoe reads bundles of format 1"),
        (lambda c: c["trajectory"].pop("gold"), r"not the content of a bundle: trajectory\.gold: Field required"),
        (
            lambda c: c["trajectory"]["token_ids"].append("1"),
            r"trajectory\.token_ids\.\d+: Input should be a valid integer",
        ),
        (lambda c: c["settings"].update(format="prose"), 'settings: format = "prose": must be one of'),
    ]:
        (bundle / FILE).write_text(original)
        tamper(bundle, change)
        with pytest.raises(UserError, match=message):
            checks(bundle, tokenizer)
    (bundle / FILE).write_text(original)
    tamper(bundle, lambda c: c["trajectory"].update(task_type="chess"))
    with pytest.raises(UserError, match="the task 'chess' is not one of"):
        checks(bundle, tokenizer)
    (bundle / FILE).write_text(original[:1000])
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_bundle(bundle)


# --- which are kept, and how -------------------------------------------------------------------------------------------


def test_failures_are_kept_by_class_and_others_by_a_rate(
    environment: Make, tokenizer: Tokenizer, harmony: Harmony, tmp_path: Path
) -> None:
    demo = environment(ENVIRONMENT)
    right = demo.grader.answer_ids(PROBLEM, "123")
    cases = [(right, "stop"), (right[:-2], "length"), (right[:-2], "stop"), (right, "abort")]
    many = [
        trajectory_of(demo, ids, finish, Problem(f"demo/{place}", "sort", "?", "123", "demo"), index)
        for place in range(100)
        for index, (ids, finish) in enumerate(cases)
    ]
    for rate, per_failure in ((0.0, 0), (0.0, 2), (0.2, 1), (1.0, 0)):
        directory = tmp_path / f"{rate}-{per_failure}"
        write = recorder(directory, demo, tokenizer, sample_rate=rate, per_failure=per_failure).write
        paths = write(5, many)
        reasons = Counter(path.name.split("-")[1] for path in paths)
        assert {
            name: reasons.pop(name) for name in ("truncated", "parse_error", "engine_error") if name in reasons
        } == (dict.fromkeys(["truncated", "parse_error", "engine_error"], per_failure) if per_failure else {})
        sampled = reasons["sampled"]
        assert sampled == {0.0: 0, 1.0: 400}.get(rate, sampled)
        assert abs(sampled - rate * (400 - 3 * per_failure)) <= 4 * (400 * rate * (1 - rate)) ** 0.5
        assert write(5, many) == paths  # the same ones again, in the place of the first
        kept = {path.name for path in directory.iterdir()}
        assert kept == {path.name for path in paths} | ({"tokenizer"} if paths else set())
        if rate == 0.2:
            assert {path.name.partition("-sampled")[2] for path in write(6, many)} != {
                path.name.partition("-sampled")[2] for path in paths
            }


def write_bundles() -> None:
    content = {"reason": "sampled", "trajectory": {"text": "x" * 300_000}}
    for place in range(10**6):
        write_bundle(Path(sys.argv[1]) / f"step_{place:06d}-sampled-x", content, np.zeros((500, 4, 2), np.int16))


def test_a_kill_leaves_no_half_bundle(tmp_path: Path) -> None:
    rng = random.Random(4)
    whole = 0
    for attempt in range(8):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        writer = Forked(tmp_path, directory, main=f"{__name__}:write_bundles")
        while not (directory / "step_000002-sampled-x").exists():
            assert writer.poll() is None
            time.sleep(0.001)
        time.sleep(rng.random() * 0.05)
        writer.kill()
        for path in directory.iterdir():
            if path.name.startswith("."):
                continue
            whole += 1
            assert json.loads((path / FILE).read_text())["trajectory"] == {"text": "x" * 300_000}
            assert np.load(path / "routes.npy").shape == (500, 4, 2)
    assert whole >= 3 * 8


@pytest.mark.parametrize(
    ("call", "nth", "whole"), [("fsync", 0, False), ("fsync", 1, False), ("rename", 0, False), ("fsync", 2, True)]
)
def test_a_write_that_ends_anywhere_leaves_a_whole_bundle_or_none(
    bundle: Path,
    environment: Make,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    nth: int,
    whole: bool,
) -> None:
    demo = environment(ENVIRONMENT)
    write = recorder(bundle.parent, demo, tokenizer).write
    trajectory = trajectory_of(demo, demo.grader.answer_ids(PROBLEM, "123"))
    real, calls = getattr(os, call), iter(range(100))

    def stop(*arguments: Any) -> Any:
        if next(calls) == nth:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(os, call, stop)
    with pytest.raises(KeyboardInterrupt):
        write(13, [trajectory])
    monkeypatch.undo()
    path = bundle.with_name(bundle.name.replace("12", "13"))
    assert path.exists() == whole
    if whole:
        assert differences(path, tokenizer) == {}
    assert not [left.name for left in bundle.parent.iterdir() if left.name.startswith(".")]
