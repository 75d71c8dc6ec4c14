"""The check of form and reasoning, and lenient grading: an answer counts wherever it stands."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

import nmoe
import nmoe.eval.format_check as format_check_module
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_environment
from nmoe.config.toml import to_toml
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.format_check import environment_of, format_check, hard_problems_alone, is_hard, report
from nmoe.eval.lenient import Gain, lenient_verdict, part_gain
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Message, Problem, Sample, Sampling, Turn

PROBLEM = Problem("m/0", "math", "What is 6 * 7?", "42", "m", {"level": "Level 5"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the answer is 42 assistant final analysis"] * 3, 320)


def environment(directory: Path, tokenizer: Tokenizer, records: list[dict[str, object]]) -> Environment:
    lines = [
        json.dumps({"problem": f"What is {place} + 41?", "answer": "42", **one}) for place, one in enumerate(records)
    ]
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    file = directory / "environment.toml"
    file.write_text('env_id = "m"\n[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "math"\n')
    return Environment.from_toml(file, tokenizer)


def answered(demo: Environment, ids: list[int], finish_reason: str = "stop") -> Trajectory:
    turns = (Turn((), Sample(ids, [0.0] * len(ids), [0] * len(ids), finish_reason)),)  # type: ignore[arg-type]
    grade = asyncio.run(demo.grader.grade(PROBLEM, turns, 500))
    return Trajectory(PROBLEM, 0, tuple(demo.prompts.ids(PROBLEM)), turns, grade, Sampling(500))


def test_form_and_reasoning_are_counted_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    demo, harmony = environment(tmp_path, tokenizer, [{}]), Harmony(tokenizer)
    thought, worked, right, wrong = (
        Message("assistant", "hm", channel="analysis"),
        Message("assistant", "6*7=42", channel="analysis"),
        Message("assistant", "42", channel="final"),
        Message("assistant", "41", channel="final"),
    )
    said = [harmony.render_completion(messages) for messages in ([worked, right], [right], [thought, wrong])]
    # Out of form: with the right answer all the same, with a wrong one, with none; and cut off behind the right one.
    said += [[*tokenizer.encode(text), harmony.stop_ids[0]] for text in (r"So \boxed{42}.", "It is 7", "hm")]
    trajectories = [answered(demo, ids) for ids in said]
    trajectories.append(answered(demo, tokenizer.encode("It is 42"), "length"))
    lines = list(report(demo, trajectories))
    assert lines[0] == "7 problems of m (level=Level 5), greedy"
    assert lines[1].startswith("format     3/7 = 42.9% [9.9%, 81.6%] have the form 'harmony'")
    assert lines[2].split("in ")[1] == "3 ok, 3 parse_error, 1 truncated"
    assert [re.search(r"(\d+/7) .*\] (.*)", line).groups() for line in (lines[4], *lines[6:8])] == [  # type: ignore[union-attr]
        ("1/7", "reason about the problem before they answer, in form"),
        ("2/7", "are right, in form"),
        ("4/7", "have the right answer anywhere (the last box, else the last number)"),
    ]
    assert lines[5] == "           others in form have, before the answer, 1 nothing, 1 off the problem"
    assert lines[8] == (
        "advice     SFT first: the form is there in 42.9%, below 95%; fine-tune on examples in it (nmoe sft)"
    )


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (r"6*7=42, so \boxed{42}", None),
        (r"\boxed{42}", "1 nothing"),
        (r"The answer is \boxed{42}", "1 the answer alone"),
        (r"What is 6 * 7? \boxed{42}", "1 the question again"),
        (r"hm hm hm hm \boxed{42} 6*7=42", "1 a loop"),  # what stands behind the box came too late
    ],
)
def test_in_plain_text_reasoning_stands_before_the_box(
    tmp_path: Path, tokenizer: Tokenizer, said: str, fault: str | None
) -> None:
    plain = environment(tmp_path, tokenizer, [{}]).settings.model_copy(update={"format": "boxed"})
    demo = Environment.from_settings(plain, tokenizer)
    stop = demo.renderer.stop_ids[0]
    _, _, _, _, reasons, *rest = report(demo, [answered(demo, [*tokenizer.encode(said), stop])])
    assert reasons.startswith("reasoning  1/1 = " if fault is None else "reasoning  0/1 = ")
    assert any("others in form have" in line for line in rest) == (fault is not None)
    assert fault is None or rest[0] == f"           others in form have, before the answer, {fault}"


@pytest.mark.parametrize(
    ("formed", "count", "advice", "open_"),
    [
        (19, 20, "straight", True),
        (18, 20, "SFT", True),
        (12, 20, "SFT", False),
        (20, 20, "straight", True),
        (400, 400, "straight", False),
    ],
)
def test_the_line_is_drawn_at_95_percent(
    tmp_path: Path, tokenizer: Tokenizer, formed: int, count: int, advice: str, open_: bool
) -> None:
    demo = environment(tmp_path, tokenizer, [{}])
    good = answered(demo, demo.grader.answer_ids(PROBLEM, "42"))
    bad = answered(demo, tokenizer.encode("42"))
    *_, last = report(demo, [good] * formed + [bad] * (count - formed))
    assert advice in last
    assert ("more --problems decide" in last) == open_


@pytest.mark.parametrize(
    ("right", "advice"),
    [
        ([0] * 20, "not RL yet: the form is there in 100.0%, but only 0.0% of samples are right, below 5%"),
        ([1] * 4 + [0] * 16, "not RL yet: the form is there in 100.0%, but only 2.5% of samples are right, below 5%"),
        ([8] * 20, "harder problems: 100.0% of samples are right, above 95%"),
        (
            [8] * 5 + [4] * 2 + [0] * 13,
            "go straight to RL: the form is there in 100.0%, at least 95%, and 30.0% of samples are",
        ),
    ],
)
def test_a_form_without_answers_is_nothing_to_reinforce(
    tmp_path: Path, tokenizer: Tokenizer, right: list[int], advice: str
) -> None:
    demo = environment(tmp_path, tokenizer, [{}])
    good, bad = (answered(demo, demo.grader.answer_ids(PROBLEM, answer)) for answer in ("42", "41"))
    groups = [Group(PROBLEM, [good] * count + [bad] * (8 - count)) for count in right]
    *_, form, ended, tokens, both, rate, solved, mixed, last = report(demo, [good] * 20, groups)
    assert last.startswith(f"advice     {advice}")
    assert form.startswith("sampled    100.0% [")
    assert ended == "           ended in 160 ok"
    assert tokens.endswith("tokens in the mean")
    assert both.startswith("           0/20 have samples in and out of form")
    assert rate == f"           {sum(right) / 160:.1%} of the samples are right (the solve rate)"
    assert solved.startswith(f"           {sum(count > 0 for count in right)}/20 = ")
    assert solved.endswith("(pass@8)")
    assert mixed.startswith(f"           {sum(0 < count < 8 for count in right)}/20 have right and wrong samples")


def test_the_form_of_samples_is_told_beside_that_of_greedy_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """RL learns from samples: 3 of 4 problems have some in form, a quarter of all, and greedy answers are cut."""
    demo = environment(tmp_path, tokenizer, [{}])
    good = answered(demo, demo.grader.answer_ids(PROBLEM, "42"))
    cut, bare = answered(demo, tokenizer.encode("It is 42"), "length"), answered(demo, [*tokenizer.encode("42"), 0])
    formed = [4, 3, 1, 0]
    groups = [Group(PROBLEM, [good] * count + [cut] * (8 - count)) for count in formed]
    lines = list(report(demo, [cut] * 3 + [bare], groups))
    *_, form, ended, _, mixed, rate, _, _, advice = lines
    assert form.startswith("sampled    25.0% [")
    assert form.endswith("] of 8 samples of each problem at temperature 1 have the form")
    assert ended == "           ended in 8 ok, 24 truncated"
    assert mixed == "           3/4 have samples in and out of form, which is what RL learns the form from"
    assert rate == "           25.0% of the samples are right (the solve rate)"
    assert advice.startswith(
        "advice     more --max-tokens first, since 3 of 4 were cut; else SFT first: the form is there in 0.0%"
    )
    assert "; or RL on the form itself, with format in [rubric]: 25.0% of samples have it" in advice
    few = [Group(PROBLEM, [good] * count + [cut] * (8 - count)) for count in (1, 0, 0, 0)]
    *_, advice = report(demo, [bare] * 3 + [cut], few)
    assert "RL on the form" not in advice
    assert "--max-tokens first" not in advice


@pytest.mark.parametrize(
    ("level", "hard"),
    [("Level 5", True), ("Level 4", True), (5, True), ("4", True), ("Level 3", False), (1, False), ("Level ?", False)],
)
def test_what_is_hard(level: str | int, hard: bool) -> None:
    assert is_hard(Problem("m/0", "math", "?", "1", "m", {"level": level})) == hard
    assert not is_hard(Problem("m/0", "math", "?", "1", "m"))


def test_the_harder_levels_are_asked_where_there_are_levels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    levels = [{"level": f"Level {1 + place % 5}"} for place in range(20)]
    demo = environment(tmp_path, tokenizer, list(levels))
    hard_problems_alone(demo)
    assert {problem.metadata["level"] for problem in demo.pool.take(50)} == {"Level 4", "Level 5"}
    for others in ([{}] * 3, [{"level": "Level 1"}] * 3):
        demo = environment(tmp_path, tokenizer, list(others))
        hard_problems_alone(demo)
        assert len(demo.pool.take(3)) == 3


def test_the_environment_of_a_run_is_found_from_the_run_and_its_checkpoints(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    environment(tmp_path, tokenizer, [{}])
    settings = load_environment(tmp_path / "environment.toml")
    run = tmp_path / "runs" / "demo"
    checkpoint = run / "checkpoints" / "step_000010"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match="no run that was trained on an environment; name the ENVIRONMENT"):
        environment_of(checkpoint)
    body = to_toml(settings)
    tables = "\n".join(
        f"[environment.{line[1:]}" if line.startswith("[") else line for line in body.splitlines() if line.strip()
    )
    (run / "config.toml").write_text(f"[run]\nsteps = 1\n[environment]\n{tables}\n")
    assert environment_of(run) == environment_of(checkpoint) == settings
    assert isinstance(environment_of(run), EnvironmentSettings)


def test_a_model_that_does_not_end_is_cut_where_the_limit_says(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment(tmp_path, tokenizer, [{}])
    shape = {"hidden_size": 16, "layers": 1, "heads": 2, "context_tokens": 8192}
    run = nmoe.train_sft(shape, data=[{"prompt": "a", "completion": "b"}], config={"run.threads": 1})
    monkeypatch.setattr(format_check_module, "TOKENS", 24)
    file = tmp_path / "environment.toml"

    def told(**settings: Any) -> list[str]:
        return list(format_check(run.path, file, 1, 0, **settings))

    def mean(lines: list[str]) -> float:
        return next(float(line.split()[0]) for line in lines if line.endswith("tokens in the mean"))

    for settings, limit in (({}, 24), ({"max_tokens": 7}, 7)):
        lines = told(**settings)
        assert lines[0] == f"completions of at most {limit} tokens (--max-tokens)"
        assert mean(lines) <= limit
    (said, *_) = told(max_tokens=100_000)
    assert re.fullmatch(
        r"completions of at most 8,1\d\d tokens \(what the prompts leave of the model's context\)", said
    )
    config = run.path / "config.toml"
    config.write_text(f"{config.read_text()}\n[sampling]\nmax_new_tokens = 9\n")
    assert told()[0] == "completions of at most 9 tokens (--max-tokens)", "the run's"
    file.write_text(f"{file.read_text()}[budget]\ncompletion_tokens = 5\n")
    assert told()[0] == "completions of at most 5 tokens (--max-tokens)"
    efforts = []
    real = Environment.from_settings.__func__  # type: ignore[attr-defined]

    def seen(cls: Any, settings: EnvironmentSettings, *more: Any, **named: Any) -> Environment:
        efforts.append(settings.reasoning_effort)
        made: Environment = real(cls, settings, *more, **named)
        return made

    monkeypatch.setattr(Environment, "from_settings", classmethod(seen))
    told(reasoning_effort="low")
    assert efforts[0] == "low"
    file.write_text(file.read_text().replace('env_id = "m"', 'env_id = "m"\nformat = "boxed"'))
    with pytest.raises(UserError, match="m: plain text has no place for a reasoning effort"):
        told(reasoning_effort="low")


@pytest.mark.parametrize(
    ("task", "gold", "text", "right"),
    [
        ("compare", "843", "To compare them, look at the hundreds. The larger number is 843, since 8 is", True),
        ("compare", "843", "843 is larger than 181", True),
        ("compare", "843", "The answer is 181.", False),
        ("compare", "843", "843 or 181?", None),
        ("gsm8k", "18", "She has 3 boxes of 6 eggs. The answer is 18 eggs. Then she", True),
        ("gsm8k", "18", "I do not know", None),
        ("text_match", "Paris", "paris.", True),
        ("text_match", "Paris", "The capital is Paris", False),
    ],
)
def test_an_answer_counts_wherever_it_stands(task: str, gold: str, text: str, right: bool | None) -> None:
    problem = Problem("p", task, "Which number is larger, 843 or 181? Answer with one number.", gold, task)
    verdict = asyncio.run(lenient_verdict(problem, text))
    assert (None if verdict is None else verdict.outcome == "correct") is right


def answers(in_form_right: int, in_form_wrong: int, right: int, wrong: int) -> list[tuple[bool, bool]]:
    return (
        [(True, True)] * in_form_right
        + [(True, False)] * in_form_wrong
        + [(False, True)] * right
        + [(False, False)] * wrong
    )


def test_a_gain_is_parted_by_hand() -> None:
    # In form 0.2 -> 0.8, right among these 0.5 -> 0.75, among the others 0.25 -> 0.5.
    before, after = answers(1, 1, 2, 6), answers(6, 2, 1, 1)
    gain = part_gain(before, after)
    assert gain is not None
    assert vars(gain) == pytest.approx(
        {"form": 0.6 * (0.625 - 0.375), "given_form": 0.5 * 0.25, "without_form": 0.5 * 0.25}
    )
    assert sum(vars(gain).values()) == pytest.approx(0.7 - 0.3)


def test_form_alone_and_correctness_alone() -> None:
    assert part_gain(answers(5, 5, 0, 10), answers(10, 10, 0, 0)) == Gain(0.25, 0.0, 0.0)
    assert part_gain(answers(5, 15, 0, 0), answers(15, 5, 0, 0)) == Gain(0.0, 0.5, 0.0)


def test_a_rate_that_a_model_does_not_show_is_the_others() -> None:
    # The base has no answer in form, so nothing is known of its rate there: the gain is form.
    assert part_gain(answers(0, 0, 1, 9), answers(9, 1, 0, 0)) == pytest.approx(Gain(0.8, 0.0, 0.0))
    assert part_gain(answers(0, 0, 1, 9), answers(0, 0, 5, 5)) is None
    with pytest.raises(ValueError, match="no answers"):
        part_gain([], answers(1, 0, 0, 0))
