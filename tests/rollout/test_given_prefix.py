"""A curriculum that gives the start of the answer: what the engine is asked, what is learned, how it is graded and replayed."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.problems import ConfigError
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.rl.experience import policy_batch
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import Collector
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import replay
from nmoe.rollout.tickets import Ticket
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Span, Trajectory
from nmoe.types import Problem, Sampling, TrainerState
from tests.scripted_engine import ScriptedEngine

Make = Callable[..., Environment]

POOL = '[task_pool]\ntype = "generated"\ntask_type = "sort"\n'
STARTS = ("<|channel|>final<|message|>", "<|channel|>final", "<|channel|>", "")
PROBLEM = Problem("demo/0", "sort", "Sort: 312", "123", "demo")


def curriculum(*given: str, metric: str = "format_ok") -> str:
    text = "[curriculum]\nwindow_steps = 1\n"
    for number, start in enumerate(given):
        text += f'[[curriculum.stages]]\nname = "{number}"\nweights = {{ structure = 1.0, format = 1.0 }}\n'
        text += f"given = '{start}'\n" if start else ""
        text += f'gate = {{ metric = "{metric}", at_least = 0.5 }}\n' if number < len(given) - 1 else ""
    return text


def played(
    environment: Environment, texts: list[str], tokenizer: Tokenizer, limit: int = 8
) -> tuple[Request, list[Trajectory]]:
    """One group whose samples are the texts, as training collects it."""
    engine = ScriptedEngine(lambda _, index: tokenizer.encode(texts[index], control_tokens=True))
    collector = Collector(engine, environment, 400)  # type: ignore[arg-type]
    sampling = Sampling(limit * 10, temperature=1.0)
    terms = collector.terms(len(texts), sampling, (0, "train"), TrainerState(), give_start=True)
    (group,) = collector.sample([Ticket(0, PROBLEM, terms)]).groups
    (request,) = engine.requests
    return request, list(group.trajectories)


def test_each_stage_gives_less(environment: Make, tokenizer: Tokenizer) -> None:
    demo = environment(POOL + curriculum(*STARTS))
    assert demo.curriculum is not None
    prompt = tuple(demo.prompts.ids(PROBLEM))
    for start in STARTS:
        given = tuple(tokenizer.encode(start, control_tokens=True))
        assert demo.prompts.given_ids == given
        form = "<|channel|>final<|message|>123<|return|>"
        request, (right, unfinished) = played(demo, [form.removeprefix(start), "12"], tokenizer)
        # The policy goes on from the start, and is graded as if it had said all of it.
        assert request.prompt_ids == (*prompt, *given)
        assert right.prompt_ids == prompt
        assert right.token_ids == tokenizer.encode(form, control_tokens=True)
        assert (right.grade.failure, right.grade.extras["format_ok"], right.grade.extras["correctness"]) == ("ok", 1, 1)
        assert right.grade.score == 2.0
        assert unfinished.grade.failure == "truncated"
        assert 0 < unfinished.grade.score < 1
        # What is given is context: only what was sampled is learned, at its own log-probability.
        sampled = len(right.token_ids) - len(given)
        assert right.sampled_tokens == sampled
        assert right.mask == [0] * len(given) + [1] * sampled
        assert right.versions == [-1] * len(given) + [1] * sampled
        spans = [Span("sampled", 0, len(given), len(given) + sampled)]
        assert list(right.spans) == [*([Span("form", 0, 0, len(given))] if given else []), *spans]
        batch = policy_batch([right], None, "token", 8)
        read = len(prompt) + len(given) - 1
        assert batch.scored_T.tolist() == [False] * read + [True] * sampled
        assert batch.targets_T[read:].tolist() == right.token_ids[len(given) :]
        assert batch.behaviour_logprobs_T[read:].tolist() == pytest.approx(right.turns[0].sample.logprobs)
        if start:
            demo.curriculum.observe({"format_ok": 1.0})
    assert demo.curriculum.stage == "3"


def test_an_evaluation_is_given_nothing(environment: Make, tokenizer: Tokenizer) -> None:
    demo = environment(POOL + curriculum(*STARTS))
    engine = ScriptedEngine(
        lambda *_: tokenizer.encode("<|channel|>final<|message|>123<|return|>", control_tokens=True)
    )
    collector = Collector(engine, demo, 400)  # type: ignore[arg-type]
    (group,) = collector.collect([PROBLEM], 1, Sampling(80), (0, "eval"), state=None).groups
    assert engine.requests[0].prompt_ids == tuple(demo.prompts.ids(PROBLEM))
    assert group.trajectories[0].grade.extras["format_ok"] == 1.0


def test_a_bundle_holds_the_start_and_replays(environment: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    demo = environment(POOL + curriculum(*STARTS))
    _, trajectories = played(demo, ["123<|return|>", "12"], tokenizer)
    recorder = ReplayRecorder(tmp_path, demo, tokenizer, seed=0, sample_rate=1.0, per_failure=1)
    for path, trajectory in zip(recorder.write(1, trajectories), trajectories, strict=True):
        bundle = read_bundle(path)
        assert bundle.trajectory().turns == trajectory.turns
        assert not list(bundle.inconsistencies())

        async def differences(bundle: Any = bundle) -> list[str | None]:
            return [check.difference async for check in replay(bundle, tokenizer)]

        assert set(asyncio.run(differences())) == {None}


def test_the_longest_start_counts_for_the_context(environment: Make, tokenizer: Tokenizer) -> None:
    demo = environment(POOL + curriculum(*STARTS))
    prompt = len(demo.prompts.ids(PROBLEM))
    given = len(tokenizer.encode(STARTS[0], control_tokens=True))
    assert demo.prompts.fits(PROBLEM, prompt + given + 10, 10)
    assert not demo.prompts.fits(PROBLEM, prompt + given + 9, 10)
    with pytest.raises(UserError, match=f"completions of up to {10 + given} do not fit"):
        demo.prompts.check(PROBLEM, prompt + given + 9, 10)


def refusals(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(tomllib.loads(f'env_id = "demo"\n{text}'), EnvironmentSettings, Locator(Place("file.toml")))
    return str(caught.value).splitlines()


def test_a_start_is_taken_away_piece_by_piece() -> None:
    (grows,) = refusals(POOL + curriculum("<|channel|>", "<|channel|>final", ""))
    assert "must be a beginning of what the stage before gives, '<|channel|>'" in grows
    (kept,) = refusals(POOL + curriculum("<|channel|>final", "<|channel|>"))
    assert "must be left out of the last stage, or the policy never learns to begin an answer" in kept
    assert "given" in refusals(POOL + curriculum("<|channel|>answer", ""))[0]


def test_only_harmony_in_one_turn_takes_a_start(environment: Make, harmony: Harmony) -> None:
    stages = curriculum(*STARTS)
    for text in ('format = "boxed"\n' + POOL, POOL.replace("sort", "guess")):
        with pytest.raises(UserError, match="`given`, the start of Harmony's answer in one turn"):
            environment(text + stages)
    with pytest.raises(UserError, match=r"leave it out in other formats, with \[tools\]"):
        environment(POOL + stages + '[tools]\nuse = ["python"]\n')
