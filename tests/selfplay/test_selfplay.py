"""Self-play: which score a proof gets, what a role earns, where problems come from, and one batch played by script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from fake_sandbox import FakeSandbox, FakeSandboxes
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from tiny_models import MOE, peaked_model

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.tables.model import OptimizerSection
from nmoe.config.tables.pools import SelfplayPool
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.grade import Grader
from nmoe.envs.pools.selfplay import open_problems
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.proofs import CLOSING, OPENING, Proof, WrittenEvaluation, read_evaluation, read_proof
from nmoe.errors import UserError
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.config import ModelConfig
from nmoe.rl.experience import policy_batch
from nmoe.rollout.collector import Collector
from nmoe.selfplay.acceptance import (
    Acceptance,
    Analysis,
    accept,
    generator_reward,
    is_true,
    meta_score,
    verifier_reward,
)
from nmoe.selfplay.play import Attempted, Judges, SelfPlay
from nmoe.selfplay.training import RoundTraining
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Message, Problem, Sample, Sampling, Turn

NONE, HALF, ALL = Fraction(0), Fraction(1, 2), Fraction(1)


def evaluation(defect: str, score: str) -> str:
    return f"{OPENING}\n{defect}\n{CLOSING} {score}"


def proof(solution: str, defect: str, score: str) -> str:
    return f"## Solution\n{solution}\n\n## Self Evaluation\n{evaluation(defect, score)}"


def claim(score: Fraction, confirmed: int, of: int = 3) -> Analysis:
    return Analysis(score, (ALL,) * confirmed + (NONE,) * (of - confirmed))


@pytest.mark.parametrize(
    ("analyses", "k", "acceptance"),
    [
        # The lowest score stands when k analyses that give it are confirmed.
        ([claim(NONE, 2), claim(NONE, 3), Analysis(ALL)], 2, Acceptance("accepted", NONE, (0, 1))),
        ([claim(NONE, 2), claim(NONE, 1), Analysis(ALL)], 2, Acceptance("unconfirmed")),
        ([claim(NONE, 2), claim(NONE, 1), Analysis(ALL)], 1, Acceptance("accepted", NONE, (0,))),
        # Those of a higher score do not help it, nor take its place.
        ([claim(NONE, 0), claim(HALF, 3), claim(HALF, 3)], 2, Acceptance("unconfirmed")),
        ([claim(HALF, 3), claim(HALF, 3), Analysis(ALL)], 2, Acceptance("accepted", HALF, (0, 1))),
        # All claims refuted: 1, with whoever said so as evidence, even nobody.
        ([claim(NONE, 1), Analysis(ALL), Analysis(ALL)], 2, Acceptance("accepted", ALL, (1, 2))),
        ([claim(NONE, 0), claim(HALF, 1)], 1, Acceptance("accepted", ALL)),
        ([Analysis(ALL)], 1, Acceptance("accepted", ALL, (0,))),
        # Half of the checks are no majority; one that finds an error in the wording confirms nothing.
        ([claim(NONE, 2, of=4)], 1, Acceptance("accepted", ALL)),
        ([Analysis(NONE, (ALL, HALF, ALL))], 1, Acceptance("accepted", NONE, (0,))),
        ([Analysis(NONE, (HALF, HALF, ALL))], 1, Acceptance("accepted", ALL)),
        # A claim that was never checked, or whose unreadable checks could have confirmed it, is no praise.
        ([Analysis(NONE)] * 4, 2, Acceptance("unchecked")),
        ([Analysis(NONE), Analysis(ALL), Analysis(ALL)], 2, Acceptance("unchecked")),
        ([Analysis(NONE, (None, None, None)), Analysis(ALL)], 1, Acceptance("unchecked")),
        ([Analysis(NONE, (ALL, None)), Analysis(ALL)], 1, Acceptance("unchecked")),
        ([Analysis(NONE, (NONE, None, None)), Analysis(ALL)], 1, Acceptance("unchecked")),
        # Two readable checks of three decide, whichever way.
        ([Analysis(NONE, (NONE, NONE, None)), Analysis(ALL)], 1, Acceptance("accepted", ALL, (1,))),
        ([Analysis(NONE, (ALL, ALL, None)), Analysis(ALL)], 1, Acceptance("accepted", NONE, (0,))),
        # Nor does an unchecked claim carry a score, or let a higher one through.
        ([Analysis(NONE), claim(NONE, 3), Analysis(ALL)], 2, Acceptance("unconfirmed")),
        ([Analysis(NONE), claim(HALF, 3)], 1, Acceptance("unconfirmed")),
        # Whoever cannot be read has not looked.
        ([Analysis(None), Analysis(None)], 1, Acceptance("unread")),
        ([], 1, Acceptance("unread")),
        ([Analysis(None), Analysis(ALL)], 1, Acceptance("unread")),
        ([Analysis(None), claim(NONE, 3)], 1, Acceptance("accepted", NONE, (1,))),
        # Confirmed claims, or missing ones, that are fewer than half of k are outvoted.
        ([claim(NONE, 3), *[Analysis(ALL)] * 3], 3, Acceptance("accepted", ALL, (1, 2, 3))),
        ([Analysis(None), *[Analysis(ALL)] * 3], 3, Acceptance("accepted", ALL, (1, 2, 3))),
        ([Analysis(NONE), *[Analysis(ALL)] * 3], 3, Acceptance("accepted", ALL, (1, 2, 3))),
        ([claim(NONE, 3), Analysis(None), *[Analysis(ALL)] * 3], 4, Acceptance("unconfirmed")),
        ([claim(NONE, 3), *[Analysis(ALL)] * 3], 2, Acceptance("unconfirmed")),
    ],
)
def test_acceptance(analyses: list[Analysis], k: int, acceptance: Acceptance) -> None:
    assert accept(analyses, k) == acceptance


scores = st.sampled_from([None, NONE, HALF, ALL])


@given(
    st.lists(st.builds(Analysis, scores, st.lists(scores, max_size=4).map(tuple)), max_size=6),
    st.integers(1, 3),
    st.randoms(),
)
def test_acceptance_by_its_definition(analyses: list[Analysis], k: int, rng: object) -> None:
    read = [one.score for one in analyses if one.score is not None]
    claims = [one for one in analyses if one.score in (NONE, HALF)]
    # A claim stands in every reading of what is missing, in none, or it depends: the missing checks all refute, or all confirm.
    certain = [one.score for one in claims if one.checks.count(ALL) > len(one.checks) / 2]
    possible = [
        one
        for one in claims
        if not one.checks or len([c for c in one.checks if c in (ALL, None)]) > len(one.checks) / 2
    ]
    k = min(k, max(1, len(analyses)))
    result = accept(analyses, k)
    if certain and certain.count(min(read)) >= k:
        assert result.score == min(read)
    else:
        # Anything that is missing may be a confirmed claim, and even then there are fewer than half of k.
        doubts = len(possible) + len(analyses) - len(read)
        assert result.score == (ALL if analyses and 2 * doubts < k else None)
    assert all(analyses[place].score == result.score for place in result.evidence)
    # In whatever order the analyses come.
    assert accept(analyses[::-1], k).score == result.score
    # A majority has to be confirmed more often the larger k is.
    assert result.score in (ALL, None) or accept(analyses, k + 1).score in (result.score, None)


def test_rewards() -> None:
    assert meta_score((ALL, HALF, None, NONE)) == pytest.approx(0.5)
    assert meta_score((None, None)) is None
    assert meta_score(()) is None
    assert verifier_reward(HALF, NONE, 1.0) == 0.5
    assert verifier_reward(HALF, NONE, 0.5) == 0.25
    assert verifier_reward(NONE, ALL, 1.0) == 0.0
    # A right proof that praises itself: all of it. One that owns up to a fatal flaw earns more than one that hides it.
    assert generator_reward(ALL, ALL, 1.0) == pytest.approx(1.0)
    assert generator_reward(NONE, NONE, 1.0) == pytest.approx(0.24)
    assert generator_reward(NONE, NONE, 0.5) == pytest.approx(0.12)
    assert generator_reward(ALL, NONE, 1.0) == 0.0
    assert generator_reward(ALL, HALF, 1.0) == pytest.approx(0.76 * 0.5 + 0.24 * 0.5)


def test_an_evaluation_is_read_from_the_reasoning_or_the_answer() -> None:
    written = evaluation("Step 2 is wrong.", "0")
    said = WrittenEvaluation(written, NONE)
    assert read_evaluation(f"Let me see.\n{written}", "0") == said
    assert read_evaluation(None, written) == said
    assert read_evaluation("thoughts", f"Well. {written}") == said
    # The score is the answer's, whatever the reasoning came to.
    assert read_evaluation(evaluation("It is not finished.", "1"), "0.5") == WrittenEvaluation(
        evaluation("It is not finished.", "0.5"), HALF
    )
    # The last of several, and the published misspelling.
    twice = f"{evaluation('First.', '1')}\n{written.replace('overall', 'overal')}"
    assert read_evaluation(twice, "0") == said
    for reasoning, answer in [
        (written, None),
        (written, "2"),
        (written, "maybe"),
        (f"{OPENING} wrong", "0"),
        (f"wrong {CLOSING}", "0"),
        (f"{CLOSING} 0 {OPENING}", "0"),
        (None, "0"),
    ]:
        assert read_evaluation(reasoning, answer) is None


def test_a_proof_has_two_parts() -> None:
    assert read_proof(proof("4+7=11", "Every step is right.", "1")) == Proof(
        "4+7=11", WrittenEvaluation(evaluation("Every step is right.", "1"), ALL)
    )
    # A solution that brings its own verdict is judged with it.
    double = proof(proof("4+7=12", "Right.", "1"), "Step 1 is wrong.", "0")
    read = read_proof(double)
    assert read is not None
    assert read.evaluation.score == NONE
    assert "Right." in read.solution
    for broken in [
        None,
        "",
        "4+7=11",
        proof("", "Right.", "1"),
        proof("4+7=11", "Right.", "2"),
        proof("4+7=11", "Right.", "1").replace("## Self Evaluation", "Self Evaluation"),
        proof("4+7=11", "Right.", "1").replace(CLOSING, "So:"),
        evaluation("Right.", "1"),
    ]:
        assert read_proof(broken) is None


@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from(["## Solution\n", "## Self Evaluation\n", OPENING, CLOSING, "1"])).map("".join)
)
def test_any_text_is_read(text: str) -> None:
    problem = Problem("p", "proof_generation", "?", "", "p")
    verdict = asyncio.run(TASKS["proof_generation"].verify(problem, Attempt(text)))
    assert (verdict.outcome == "correct") == (read_proof(text) is not None)
    read_evaluation(text, text)


def test_a_score_without_a_gold_is_read_and_not_rewarded() -> None:
    problem = Problem("p", "proof_verification", "?", "", "p")
    verdict = asyncio.run(TASKS["proof_verification"].verify(problem, Attempt("0.5")))
    assert (verdict.outcome, verdict.score, verdict.layer) == ("incorrect", 0.0, "unlabelled")


INPUTS = [
    {"id": "a-1", "question": "Sum: 4+7", "answer": "11", "contest": "sums", "problem_idx": "1"},
    {"id": "a-2", "question": "Sum: 2+7", "answer": "9", "contest": "sums", "problem_idx": "2"},
    {"id": "a-3", "question": " Sum: 4+7\n", "answer": "11", "contest": "sums", "problem_idx": "3"},
]


def read(source: str, **keys: object) -> list[Problem]:
    order = open_problems("open", SelfplayPool(type="selfplay", source=source, **keys))
    return sorted((order.at(place) for place in range(order.size)), key=lambda problem: problem.id)


def test_sources(tmp_path: Path) -> None:
    inputs, lines = tmp_path / "inputs.json", tmp_path / "lines.jsonl"
    inputs.write_text(json.dumps(INPUTS))
    lines.write_text(
        "".join(json.dumps({"prompt": one["question"], "answer": "11", "text": "other"}) + "\n" for one in INPUTS)
    )
    problems = read(f"deepseek_math_v2_inputs:{inputs}")
    assert [(one.id, one.metadata["problem"], one.gold, one.task_type) for one in problems] == [
        ("open/0", "Sum: 4+7", "", "proof_generation"),
        ("open/1", "Sum: 2+7", "", "proof_generation"),
    ]
    assert problems[0].metadata == {"record": 0, "input_id": "a-1", "problem": "Sum: 4+7"}
    # No answer comes along in any way.
    assert "11" not in repr(problems)
    for source in (f"jsonl:{lines}", f"hf:{lines}:train"):
        assert [one.metadata["problem"] for one in read(source)] == ["Sum: 4+7", "Sum: 2+7"]
    assert [one.metadata["problem"] for one in read(f"jsonl:{lines}", problem_field="text")] == ["other"]
    assert len(read(f"jsonl:{lines}", max_examples=1)) == 1
    order = open_problems("open", SelfplayPool(type="selfplay", source=f"jsonl:{lines}"))
    assert (order.records, order.duplicates) == (3, 1)


def test_problems_of_labelled_steps(tmp_path: Path) -> None:
    """Many solutions of one problem are one problem, and its answer stays where it is."""
    rows = [
        {
            "input": f"{question} Step 1: 4+{n}={4 + n} ки",
            "label": f"{question} Step 1: 4+{n}={4 + n} +",
            "task": "MATH",
        }
        for n in (7, 8)
        for question in (f"Sum: 4+{n}",) * 2
    ]
    file = tmp_path / "shepherd.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [one.metadata["problem"] for one in read(f"math_shepherd:{file}")] == ["Sum: 4+7", "Sum: 4+8"]
    step = {
        "completions": [{"text": "4+7=11", "rating": 1, "flagged": False}],
        "human_completion": None,
        "chosen_completion": 0,
    }
    record = {
        "is_quality_control_question": False,
        "is_initial_screening_question": False,
        "question": {"problem": "Sum: 4+7", "ground_truth_answer": "secret"},
        "label": {"steps": [step], "finish_reason": "solution"},
    }
    file.write_text(json.dumps(record) + "\n")
    (problem,) = read(f"prm800k:{file}")
    assert problem.metadata["problem"] == "Sum: 4+7"
    assert "secret" not in repr(problem)


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        (
            "prm900k",
            "",
            "'prm900k' is not a source of problems; those are prm800k[:PATH], math_shepherd[:PATH], hf:NAME",
        ),
        ("jsonl:", "", "is not a source of problems"),
        ("prm800k:", "", "is not a source of problems"),
        ("prm800k:FILE.absent", "", "cannot be read"),
        ("hf:name", "", "is not a source of problems"),
        ("hf::train", "", "is not a source of problems"),
        ("jsonl:FILE.absent", "", "No such file"),
        ("deepseek_math_v2_inputs:FILE", json.dumps(INPUTS)[:-40], "FILE"),
        ("deepseek_math_v2_inputs:FILE", json.dumps([{"question": "?"}]), "no 'id'"),
        (
            "deepseek_math_v2_inputs:FILE",
            json.dumps([{"id": 1, "question": ""}]),
            "holds '', not the text of a problem",
        ),
        ("deepseek_math_v2_inputs:FILE", "[]", "no records"),
        ("jsonl:FILE", '{"question": 3}', "FILE:1: field 'question' holds 3"),
        ("jsonl:FILE", '{"question": "?"}\n{"que', "FILE:2: not JSON"),
        (
            "jsonl:FILE",
            '{"text": "?"}',
            "FILE:1: none of the fields problem, question, prompt, input; the fields are 'text'",
        ),
        ("jsonl:FILE", '{"question": "\\ud800"}', "FILE:1: field 'question' holds a lone surrogate"),
    ],
)
def test_bad_sources(tmp_path: Path, source: str, content: str, message: str) -> None:
    file = tmp_path / "problems"
    file.write_text(content)
    with pytest.raises(UserError) as error:
        read(source.replace("FILE", str(file)))
    assert message.replace("FILE", str(file)) in str(error.value)


Answers = Callable[[str, int], tuple[str, str]]


def played(
    tmp_path: Path,
    tokenizer: Tokenizer,
    harmony: Harmony,
    answers: Answers,
    *,
    samples: int = 2,
    context: int = 4096,
    more: int = 0,
    sandbox: FakeSandbox | None = None,
) -> tuple[list[Attempted], list[str]]:
    """A batch of two problems, answered by script: `answers(prompt, index)` gives reasoning and answer. Also the prompts asked.
    With a sandbox every role has the tool bash, and begins with a call of it."""
    inputs = tmp_path / "inputs.json"
    inputs.write_text(json.dumps(INPUTS))
    settings = {
        "env_id": "play",
        "version": "1",
        "format": "harmony",
        "task_pool": {"type": "selfplay", "source": f"deepseek_math_v2_inputs:{inputs}"},
        **({} if sandbox is None else {"tools": {"use": ["bash"]}}),
    }
    environment = Environment.from_settings(parse(settings, EnvironmentSettings, Locator(Place("test"))), tokenizer)
    asked: list[str] = []

    def script(request: Request, index: int) -> list[int]:
        prompt = tokenizer.decode(request.prompt_ids)
        if index == 0:
            asked.append(prompt)
        if sandbox is not None and "done\n" not in prompt:
            return harmony.render_completion(
                [Message("assistant", '{"script": "ls"}', "commentary", recipient="functions.bash")]
            )
        reasoning, answer = answers(prompt, index)
        if not answer:
            return tokenizer.encode(reasoning)
        return harmony.render_completion(
            [Message("assistant", reasoning, channel="analysis"), Message("assistant", answer, channel="final")]
        )

    sandboxes = None if sandbox is None else FakeSandboxes(sandbox)
    collector = Collector(ScriptedEngine(script), environment, context, sandboxes)
    play = SelfPlay(
        environment, collector, collector, collector, samples, Sampling(1000), Judges(4, 3, 2, more), context
    )
    problems = sorted(environment.pool.take(2), key=lambda problem: problem.id)
    return play.play(problems, (0, "selfplay", 1)), asked


def test_a_batch(tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony) -> None:
    """The second sample of each problem is wrong, and one verifier of four overlooks it; of the right ones, one makes a defect
    up; the checks find out."""
    wrong, right = "Step 1 is wrong: 4+7=12", "Every step is right."

    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Evaluation\n" in prompt:
            true = "4+7=12\n\n## Evaluation" in prompt
            return "Looking.", "1" if true and index != 0 else "0"
        if "## Solution\n4+7=" in prompt:
            finds = ("4+7=12" in prompt) == (index != 3)
            return evaluation(wrong if finds else right, "0" if finds else "1"), "0" if finds else "1"
        return "Adding.", proof("4+7=11" if index == 0 else "4+7=12", right, "1")

    attempts, asked = played(tmp_path, tokenizer, harmony, answers)
    assert [attempt.outcome for attempt in attempts] == ["accepted"] * 4
    assert [attempt.score for attempt in attempts] == [ALL, NONE, ALL, NONE]
    assert [attempt.acceptance.evidence for attempt in attempts if attempt.acceptance] == [(0, 1, 2)] * 4
    # Praise of oneself where there is a flaw earns nothing; where there is none, everything.
    assert [attempt.generator_reward() for attempt in attempts] == pytest.approx([1.0, 0.0, 1.0, 0.0])
    first, second = attempts[0], attempts[1]
    assert [first.verifier_reward(one) for one in first.analyses] == pytest.approx([1.0, 1.0, 1.0, 0.0])
    # Two of three checks confirm the real defect: R_meta is 2/3.
    assert [second.verifier_reward(one) for one in second.analyses] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0.0])
    # The grades are those of the accepted score and of the majority.
    assert [one.trajectory.grade.score for one in second.analyses] == [1.0, 1.0, 1.0, 0.0]
    assert [check.grade.score for check in second.analyses[0].checks] == [0.0, 1.0, 1.0]
    assert [check.grade.score for check in first.analyses[3].checks] == [1.0, 1.0, 1.0]
    assert first.own is not None
    assert first.own.checks == []
    assert [one.true for _, one in first.judged if one.analysis.claims] == [False]
    assert [one.true for _, one in second.judged if one.analysis.claims] == [True] * 3
    # Two prompts to solve, four to verify, three claims of each wrong proof and one of each right one to check.
    assert len(asked) == 2 + 4 + 8
    assert len(second.trajectories) == 1 + 4 + 9
    # Nobody saw a gold, nor did a judge see what the author thinks of the proof.
    assert not any('"answer"' in prompt or "Self WrittenEvaluation\n" + OPENING in prompt for prompt in asked)
    assert all("Adding." not in prompt for prompt in asked)


@pytest.mark.parametrize(
    ("claims_again", "score", "true"),
    [
        # One claim of eight is outvoted: the proof is right, and the claim false although its checks confirm it.
        (0, ALL, [False]),
        # Two of eight are too many to be outvoted, and too few for a label: nothing is settled.
        (1, None, [None, None]),
        # With more verifications k = 2 of 4 becomes 4 of 8. Only the claim that is made most often is settled as true.
        (2, None, [None, None, None]),
        (3, NONE, [None, True, True, True]),
    ],
)
def test_a_proof_in_doubt_is_verified_again(
    tmp_path: Path,
    tokenizer: Tokenizer,
    harmony: Harmony,
    claims_again: int,
    score: Fraction | None,
    true: list[bool | None],
) -> None:
    """One of four verifications claims a defect, and its checks confirm it; of the next four `claims_again` claim another."""
    began: dict[str, int] = {}

    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Evaluation\n" in prompt:
            return "Looking.", "1"
        if "## Solution\n" in prompt:
            began[prompt] = began.get(prompt, 0) + (index == 0)
            claims, step = (1, 1) if began[prompt] == 1 else (claims_again, 2)
            finds = index < claims
            return evaluation(
                f"Step {step} is wrong." if finds else "Right.", "0" if finds else "1"
            ), "0" if finds else "1"
        return "Adding.", proof("4+7=12", "Right.", "1")

    attempts, _ = played(tmp_path, tokenizer, harmony, answers, samples=1, more=4)
    for attempt in attempts:
        assert len(attempt.analyses) == 8
        assert (attempt.score, attempt.outcome) == (score, "unconfirmed" if score is None else "accepted")
        claims = [one for one in attempt.analyses if one.analysis.claims]
        assert [one.true for one in claims] == true
        assert all(one.analysis.stands for one in claims)
        labels = [one.true is not False for one in claims]
        assert [{check.grade.score for check in one.checks} for one in claims] == [{float(label)} for label in labels]
        # The second four are problems of their own, so that their bundles and seeds are.
        ids = {one.trajectory.problem.id: one.trajectory.index for one in attempt.analyses}
        assert len(ids) == 2
        assert len({one.trajectory.seed for one in attempt.analyses}) == 2
    # Where all agree, nobody is asked again.
    agreed, _ = played(tmp_path, tokenizer, harmony, wrong_proof(lambda index: ("Looking.", "1")), samples=1, more=4)
    assert [len(attempt.analyses) for attempt in agreed] == [4, 4]


@pytest.mark.parametrize(
    ("analysis", "score", "repeated", "true"),
    [
        (claim(NONE, 3), ALL, True, False),
        (Analysis(NONE), ALL, False, False),
        (claim(NONE, 3), NONE, True, True),
        (claim(NONE, 3), NONE, False, None),
        (claim(NONE, 1), NONE, True, False),
        (Analysis(NONE, (None, None, None)), NONE, True, None),
        (claim(HALF, 3), NONE, True, None),
        (claim(NONE, 3), None, True, None),
        (claim(NONE, 0), None, True, None),
    ],
)
def test_what_the_score_of_a_proof_settles(
    analysis: Analysis, score: Fraction | None, repeated: bool, true: bool | None
) -> None:
    assert is_true(analysis, score, repeated) is true


def test_every_role_may_use_tools(tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony) -> None:
    """Proof, verification and check each take a turn with the tool before they answer; labels and rewards are as without it."""

    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Evaluation\n" in prompt:
            return "Looking.", "1"
        if "## Solution\n" in prompt:
            return evaluation("Step 1 is wrong: 4+7=12", "0"), "0"
        return "Adding.", proof("4+7=12", "Right.", "1")

    sandbox = FakeSandbox()
    attempts, _ = played(tmp_path, tokenizer, harmony, answers, samples=1, context=8192, sandbox=sandbox)
    assert [attempt.score for attempt in attempts] == [NONE] * 2
    for attempt in attempts:
        assert len(attempt.trajectories) == 1 + 4 + 4 * 3
        for trajectory in attempt.trajectories:
            assert [event.output for event in trajectory.tool_events] == ["done\n"]
            assert len(trajectory.turns) == 2
            assert 0 in trajectory.mask
        assert [one.trajectory.grade.score for one in attempt.analyses] == [1.0] * 4
        assert {check.grade.score for one in attempt.analyses for check in one.checks} == {1.0}
    assert len(sandbox.commands) == 2 * (1 + 4 + 12)


def test_replies_in_no_form(tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony) -> None:
    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Solution\n4+7=11" in prompt:
            return "no phrases", "1"
        return ("Adding.", proof("4+7=11", "Right.", "1")) if index == 0 else ("cut", "")

    attempts, _ = played(tmp_path, tokenizer, harmony, answers)
    assert [attempt.outcome for attempt in attempts] == ["unread", "no_proof"] * 2
    assert [attempt.generator_reward() for attempt in attempts] == [None, 0.0] * 2


def wrong_proof(checked: Callable[[int], tuple[str, str]]) -> Answers:
    """A wrong proof that praises itself, which every verifier calls wrong; `checked` answers for the meta-verifiers."""
    defect = "Step 1 is wrong: 4+7 is not 12. " * 10

    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Evaluation\n" in prompt:
            return checked(index)
        if "## Solution\n" in prompt:
            return evaluation(defect, "0"), "0"
        return "Adding.", proof("4+7=12 " * 10, "Every step is right.", "1")

    return answers


@pytest.mark.parametrize("context", [2000, 4096])
def test_a_claim_that_does_not_fit_the_context_gives_no_label(
    tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony, context: int
) -> None:
    """The same wrong proof with and without room for the check of what all verifiers claim."""
    answers = wrong_proof(lambda index: ("Looking.", "1"))
    attempts, asked = played(tmp_path, tokenizer, harmony, answers, samples=1, context=context)
    room = context == 4096
    assert sum("## Evaluation\n" in prompt for prompt in asked) == (8 if room else 0)
    assert [attempt.outcome for attempt in attempts] == ["accepted" if room else "unchecked"] * 2
    assert [attempt.score for attempt in attempts] == [NONE if room else None] * 2
    assert [attempt.generator_reward() for attempt in attempts] == [0.0 if room else None] * 2


def test_checks_that_cannot_be_read_give_no_label(tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony) -> None:
    attempts, _ = played(
        tmp_path, tokenizer, harmony, wrong_proof(lambda index: ("Looking.", "0" if index == 0 else "hm")), samples=1
    )
    assert [attempt.outcome for attempt in attempts] == ["unchecked"] * 2
    assert [attempt.generator_reward() for attempt in attempts] == [None] * 2
    # Nor are the checks themselves graded by what nobody knows.
    assert attempts[0].analyses[0].checks[0].problem.gold == ""
    assert [one.analysis.stands for one in attempts[0].analyses] == [None] * 4


def test_an_own_claim_that_nobody_could_check_earns_nothing(
    tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony
) -> None:
    """The verifiers find no defect; the author claims one, and the checks of it are unreadable."""

    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Evaluation\n" in prompt:
            return "Looking.", "hm"
        if "## Solution\n" in prompt:
            return evaluation("Every step is right.", "1"), "1"
        return "Adding.", proof("4+7=11", "A step is missing.", "0.5")

    attempts, _ = played(tmp_path, tokenizer, harmony, answers, samples=1)
    assert [attempt.score for attempt in attempts] == [ALL] * 2
    assert [attempt.generator_reward() for attempt in attempts] == [None] * 2


def test_an_own_claim_too_long_to_be_checked_escapes_no_reward(
    tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony
) -> None:
    """Whether its own evaluation can be checked is up to the author: a long one is worth nothing, the proof keeps its reward."""
    defect = "A step is missing."

    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Evaluation\n" in prompt:
            return "Looking.", "1"
        if "## Solution\n" in prompt:
            return evaluation("Every step is right.", "1"), "1"
        return "Adding.", proof("4+7=11", defect, "0.5")

    short, asked = played(tmp_path, tokenizer, harmony, answers, samples=1, context=2000)
    assert sum("## Evaluation\n" in prompt for prompt in asked) == 2
    assert [attempt.generator_reward() for attempt in short] == [pytest.approx(0.76 + 0.24 * 0.5)] * 2
    defect *= 30
    long, asked = played(tmp_path, tokenizer, harmony, answers, samples=1, context=2000)
    assert not any("## Evaluation\n" in prompt for prompt in asked)
    assert [attempt.score for attempt in long] == [ALL] * 2
    assert [attempt.generator_reward() for attempt in long] == [pytest.approx(0.76)] * 2


def test_a_verification_too_long_to_be_checked_earns_nothing(
    tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony
) -> None:
    """The others' claims stand and make the label; the long one has no part in it."""

    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Evaluation\n" in prompt:
            return "Looking.", "1"
        if "## Solution\n" in prompt:
            return evaluation("Step 1 is wrong. " * (30 if index == 0 else 1), "0"), "0"
        return "Adding.", proof("4+7=12", "Every step is right.", "1")

    attempts, _ = played(tmp_path, tokenizer, harmony, answers, samples=1, context=2000)
    for attempt in attempts:
        assert attempt.score == NONE
        assert [one.asked for one in attempt.analyses] == [0, 3, 3, 3]
        assert [attempt.verifier_reward(one) for one in attempt.analyses] == [0.0, 1.0, 1.0, 1.0]


def test_lost_verifications_and_checks_are_not_silence(tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony) -> None:
    """What the infrastructure loses is missing from the trajectories, and counts all the same."""

    def answers(prompt: str, index: int) -> tuple[str, str]:
        if "## Solution\n" in prompt:
            return evaluation("Every step is right.", "1"), "1"
        return "Adding.", proof("4+7=11", "Right.", "1")

    def losing(kind: str, places: set[int], answers: Answers) -> Attempted:
        original = Grader.grade

        async def grade(self: Grader, problem: Problem, turns: Any, limit: int, **given: Any) -> Grade:
            found = await original(self, problem, turns, limit, **given)
            nonlocal graded
            if problem.task_type == kind and problem.gold == "":
                graded += 1
                if (graded - 1) % 4 in places:
                    return replace(found, failure="engine_error")
            return found

        graded = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Grader, "grade", grade)
            return played(tmp_path, tokenizer, harmony, answers, samples=1)[0][0]

    assert losing("proof_verification", set(), answers).score == ALL
    assert losing("proof_verification", {2}, answers).outcome == "unread"
    assert losing("proof_verification", {0, 1, 2, 3}, answers).outcome == "lost"
    confirming = wrong_proof(lambda index: ("Looking.", "1"))
    assert losing("meta_verification", set(), confirming).score == NONE
    assert losing("meta_verification", {0, 1, 2, 3}, confirming).outcome == "unchecked"


def test_a_proof_too_long_to_be_verified_is_left_out(tmp_path: Path, tokenizer: Tokenizer, harmony: Harmony) -> None:
    attempts, asked = played(
        tmp_path,
        tokenizer,
        harmony,
        lambda *_: ("Adding.", proof("4+7=11 " * 80, "Right.", "0")),
        samples=1,
        context=1900,
    )
    assert [attempt.outcome for attempt in attempts] == ["overlong"] * 2
    assert [attempt.generator_reward() for attempt in attempts] == [None] * 2
    assert len(asked) == 2


def test_the_experts_of_the_verifier_are_recorded_beside_its_loss() -> None:
    """An update on two of three verifications, against the same pass of a twin; without verifications there is none."""

    def learner() -> Learner:
        return Learner(peaked_model(ModelConfig(**MOE), 0), OptimizerSection(learning_rate=1e-3), 10, 4096)

    def verification(tokens: list[int]) -> Trajectory:
        sample = Sample(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")
        return Trajectory(
            Problem("p", "", "", "", ""), 0, (5, 6), (Turn((), sample),), Grade(1.0, {}, "ok", {}, None), Sampling(8)
        )

    evidence = [verification(tokens) for tokens in ([7, 2], [8, 9, 2], [4, 2])]
    training = RoundTraining(evidence, [], [[0, 2], []], [])
    found = training.verifier_update(learner(), 0)
    batch = policy_batch([evidence[0], evidence[2]], None, "sequence", 1)
    result = learner().forward_backward(batch, cross_entropy).result()
    twin = result.routing_metrics()
    assert found["verifier_tokens_in_batch"] == 4
    assert found["verifier_loss"] == result.loss
    assert {name: value for name, value in found.items() if "expert" in name} == {
        f"verifier_{name}": value for name, value in twin.items() if "expert" in name
    }
    for layer in range(len(ModelConfig(**MOE).moe_layers)):
        load = found[f"verifier_expert_load/{layer}"]
        assert isinstance(load, list)
        assert found[f"verifier_expert_load_max_violation/{layer}"] == pytest.approx(
            max(load) * len(load) - 1, abs=1e-4
        )
        assert found[f"verifier_dead_experts/{layer}"] == load.count(0)
    assert training.verifier_update(learner(), 1) == {}
