"""Evaluation against an engine that answers by script: modes, datasets, values and intervals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from scipy import stats

from nmoe.config.modes import mode_of
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.eval import probes as probes_module
from nmoe.eval.evaluate import Evaluation, distinct_problems, evaluate
from nmoe.eval.probes import HeldOutProblems
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Sample

R = TypeVar("R")

ONE = 'env_id = "skills"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\ndifficulty = [4, 4]\n'
TWO = 'env_id = "skills"\n[task_pool]\ntype = "mixture"\n' + "".join(
    f'[[task_pool.sources]]\nname = "{task}"\ntype = "generated"\ntask_type = "{task}"\nweight = {weight}\n'
    'difficulty = [4, 4]\nsplit = "eval"\n'
    for task, weight in [("sort", 3), ("reverse", 1)]
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["Sort: Reverse: 12 assistant final"] * 3, 300)


class ScriptedEngine:
    """Its n-th sample is right where the n-th entry of `script` says so: requests in order, their samples in order."""

    def __init__(self, tokenizer: Tokenizer, script: str) -> None:
        self.harmony = Harmony(tokenizer)
        self.script = [sign == "+" for sign in script if sign != " "]
        self.requests: list[Request] = []
        self.questions: list[str] = []

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return asyncio.run(coroutine)

    async def samples(self, request: Request) -> AsyncIterator[tuple[int, Sample]]:
        self.requests.append(request)
        user = self.harmony.parse(list(request.prompt_ids)[: -len(self.harmony.render_prompt([]))])[-1]
        self.questions.append(user.content)
        for index in range(request.samples):
            yield index, self.sample(user.content)

    def sample(self, question: str) -> Sample:
        task, _, digits = question.partition(": ")
        gold = "".join(sorted(digits)) if task == "Sort" else digits[::-1]
        text = gold if self.script.pop(0) else "no"
        ids = self.harmony.render_completion([Message("assistant", text, channel="final")])
        return Sample(ids, [0.0] * len(ids), [0] * len(ids), "stop")


def evaluated(
    engine: ScriptedEngine, environment: str, path: Path, problems: int, samples: int, temperature: float
) -> list[Evaluation]:
    path.write_text(environment)
    loaded = Environment.from_toml(path, engine.harmony.tokenizer)
    return evaluate(
        engine,  # type: ignore[arg-type]
        loaded,
        context_tokens=200,
        problems=problems,
        samples=samples,
        temperature=temperature,
        max_new_tokens=40,
        seed=5,
    )


def exact(successes: int, total: int) -> tuple[float, float]:
    """scipy's interval of Clopper and Pearson."""
    interval = stats.binomtest(successes, total).proportion_ci(0.95, method="exact")
    return pytest.approx(interval.low), pytest.approx(interval.high)


@pytest.mark.parametrize(("temperature", "mode"), [(0.0, "greedy_pass@1"), (0.7, "sampling_pass@1")])
def test_one_sample_of_each_problem(temperature: float, mode: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "+-++")
    results = evaluated(engine, ONE, tmp_path / "e.toml", problems=4, samples=1, temperature=temperature)
    assert results == [Evaluation(mode, "skills", 4, 0.75, *exact(3, 4))]
    assert {(request.samples, request.sampling.temperature) for request in engine.requests} == {(1, temperature)}
    assert {request.sampling.max_new_tokens for request in engine.requests} == {40}
    assert len({request.sampling.seed for request in engine.requests}) == 4


def test_several_samples_give_the_mean_and_pass_at_k(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "++ +- -- -- ++ +- -- -- +- --")
    mean, any_of, majority = evaluated(engine, ONE, tmp_path / "e.toml", problems=10, samples=2, temperature=1.0)
    assert (mean.mode, mean.dataset, mean.problems, mean.value) == ("sampling_pass@1", "skills", 10, 0.35)
    # Shares 1 1/2 0 0 1 1/2 0 0 1/2 0: squares 2 * 0.65^2 + 3 * 0.15^2 + 5 * 0.35^2, and a quarter of a problem at each end.
    variance = (2 * 0.65**2 + 3 * 0.15**2 + 5 * 0.35**2 + 0.25 * (0.35**2 + 0.65**2)) / 9 / 10
    problems = 0.35 * 0.65 / variance  # as many outcomes of 0 or 1 have this variance
    low = stats.beta.ppf(0.025, 0.35 * problems, 0.65 * problems + 1)
    high = stats.beta.ppf(0.975, 0.35 * problems + 1, 0.65 * problems)
    assert (mean.low, mean.high) == (pytest.approx(low), pytest.approx(high))
    assert any_of == Evaluation("pass@2", "skills", 10, 0.5, *exact(5, 10))
    # Of two answers that differ the first is taken.
    assert majority == Evaluation("sampling_pass@2", "skills", 10, 0.5, *exact(5, 10))


def test_every_k_from_one_sampling(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "++-- +--- ----")
    results = evaluated(engine, ONE, tmp_path / "e.toml", problems=3, samples=4, temperature=1.0)
    assert {one.mode: one.value for one in results} == {
        "sampling_pass@1": pytest.approx((1 / 2 + 1 / 4) / 3),
        "pass@2": pytest.approx((5 / 6 + 1 / 2) / 3),  # of six pairs one is all wrong, of three of six
        "pass@3": pytest.approx((1 + 3 / 4) / 3),
        "pass@4": pytest.approx(2 / 3),
        # "no" is an answer too: two say each in the first problem, of which the first counts.
        "sampling_pass@4": pytest.approx(1 / 3),
    }
    assert all(one.low < one.value < one.high and one.problems == 3 for one in results)


def test_an_interval_stays_between_0_and_1(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "++ +- --")
    mean, any_of, _ = evaluated(engine, ONE, tmp_path / "e.toml", problems=3, samples=2, temperature=1.0)
    assert (mean.mode, mean.value) == ("sampling_pass@1", 0.5)
    assert 0 < mean.low < 0.05
    assert 0.95 < mean.high < 1
    assert any_of == Evaluation("pass@2", "skills", 3, pytest.approx(2 / 3), *exact(2, 3))


def test_one_problem_says_nothing_of_the_spread_between_problems(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "+-+-")
    mean, of_two, _, any_of, _ = evaluated(engine, ONE, tmp_path / "e.toml", problems=1, samples=4, temperature=1.0)
    assert mean == Evaluation("sampling_pass@1", "skills", 1, 0.5, 0.0, 1.0)
    assert of_two == Evaluation("pass@2", "skills", 1, pytest.approx(5 / 6), 0.0, 1.0)
    assert any_of == Evaluation("pass@4", "skills", 1, 1.0, *exact(1, 1))


def test_each_source_of_a_mixture_has_its_own_value(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "+--+++-+-+++")
    script = list(engine.script)
    results = evaluated(engine, TWO, tmp_path / "e.toml", problems=12, samples=1, temperature=0.0)
    of = {
        name: [right for question, right in zip(engine.questions, script, strict=True) if question.startswith(prefix)]
        for name, prefix in [("", ""), ("/reverse", "Reverse"), ("/sort", "Sort")]
    }
    assert min(map(len, of.values())) > 1
    assert results == [
        Evaluation(
            "greedy_pass@1", f"skills{name}", len(rights), sum(rights) / len(rights), *exact(sum(rights), len(rights))
        )
        for name, rights in of.items()
    ]


def test_greedy_samples_are_all_the_same_and_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="temperature 0 gives the same completion 2 times"):
        evaluated(ScriptedEngine(tokenizer, ""), ONE, tmp_path / "e.toml", problems=1, samples=2, temperature=0.0)


def test_how_an_evaluation_is_recorded_and_shown() -> None:
    evaluation = Evaluation("greedy_pass@1", "skills/sort", 400, 0.9312, 0.9, 0.95)
    assert evaluation.record() == {
        "mode": "greedy_pass@1",
        "dataset": "skills/sort",
        "problems": 400,
        "value": 0.9312,
        "low": 0.9,
        "high": 0.95,
    }
    assert str(evaluation) == "greedy_pass@1 on skills/sort 93.1% [90.0%, 95.0%] of 400"


class CuttingEngine(ScriptedEngine):
    """Cuts the samples that are not right."""

    def sample(self, question: str) -> Sample:
        right, sample = self.script[0], super().sample(question)
        return sample if right else Sample(sample.token_ids[:-1], sample.logprobs[:-1], sample.versions[:-1], "length")


@pytest.mark.parametrize(("samples", "script"), [(1, "+--"), (4, "++-- ---- ----")])
def test_a_run_keeps_how_its_evaluations_failed_and_the_answers(
    samples: int, script: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes_module, "COMPLETIONS", 2 * samples)
    (tmp_path / "e.toml").write_text(ONE)
    environment = Environment.from_toml(tmp_path / "e.toml", tokenizer)
    mode = mode_of(None, samples, 0.0 if samples == 1 else 1.0)
    with ToolRuntime(environment, SandboxSettings()) as tools:
        probe = HeldOutProblems(environment, tools, problems=3, mode=mode, max_new_tokens=40, seed=5)
        first, *others = probe.evaluate(CuttingEngine(tokenizer, script), 200)
    right = script.count("+")
    assert first.mode == mode.name
    assert first.failures == {"ok": right, "truncated": 3 * samples - right}
    assert str(first).endswith(f" of 3, {3 * samples - right} of {3 * samples} were cut at 40 new tokens")
    assert first.answers is not None
    assert [len(one["answers"]) for one in first.answers] == [samples, samples], "the third is beyond what is kept"
    one = first.answers[0]
    assert one["correct"] == [True, True, False, False][:: 4 // samples][:samples]
    assert one["answers"][0] == one["gold"] == "".join(sorted(one["question"].removeprefix("Sort: ")))
    assert [failure == "ok" for failure in one["failures"]] == one["correct"]
    assert all(other.answers is None and other.failures is None for other in others)


def test_problems_of_an_evaluation_are_distinct(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "env.toml"
    file.write_text(ONE.replace("[4, 4]", "[1, 1]"))
    # One digit: ten questions at most, and the pool repeats them without end.
    found = distinct_problems(Environment.from_toml(file, tokenizer), 50)
    assert len(found) == len({problem.question for problem in found}) <= 10
    file.write_text(ONE)
    environment = Environment.from_toml(file, tokenizer)
    assert [p.question for p in distinct_problems(environment, 3)] == [
        p.question for p in Environment.from_toml(file, tokenizer).pool.take(3)
    ]


def test_fewer_problems_than_were_asked_for_are_named_by_each_evaluation_and_once_by_a_probe(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "env.toml"
    file.write_text(ONE.replace("[4, 4]", "[1, 1]"))
    count = len(distinct_problems(Environment.from_toml(file, tokenizer), 50))
    environment = Environment.from_toml(file, tokenizer)
    line = f"skills: problems = 50, and there are only {count} different ones to ask\n"
    for asked, said in ((count, ""), (50, line), (50, line)):
        engine = ScriptedEngine(tokenizer, "+" * count)
        settings = {"samples": 1, "temperature": 0.0, "max_new_tokens": 40, "seed": 5}
        (result,) = evaluate(engine, environment, context_tokens=200, problems=asked, **settings)  # type: ignore[arg-type]
        assert result.problems == count
        assert capsys.readouterr().err == said
    with ToolRuntime(environment, SandboxSettings()) as tools:
        probe = HeldOutProblems(environment, tools, problems=50, mode=mode_of(), max_new_tokens=40, seed=5)
        for said in (line, ""):
            (result,) = probe.evaluate(ScriptedEngine(tokenizer, "+" * count), 200)
            assert (result.problems, capsys.readouterr().err) == (count, said)
