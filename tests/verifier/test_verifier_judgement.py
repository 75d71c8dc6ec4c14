"""Verifiers: how solutions are shown, what is read where, and the figures of how good that is."""

from __future__ import annotations

import asyncio
import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe.errors import UserError
from nmoe.learner.passes import batch_logprobs
from nmoe.model.config import ModelConfig
from nmoe.model.head import Head
from nmoe.model.transformer import Transformer
from nmoe.speedrun.steps import step_texts
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier.form import DiscriminativeForm, GenerativeForm, form_batch, make_form
from nmoe.verifier.judge import Description, Judge, calibration, processbench, rate
from nmoe.verifier.scorers import Verifier, load_scorer, load_step_scorer

MESSAGES = [Message("user", "Sum: 4+7+2")]
STEPS = ["4+7=11", "11+3=14", "so 14"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(step_texts(0, 20), 500)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate_size=48,
        context_tokens=256,
    )
    return Transformer(shape).initialize(0)


def test_f1_is_the_harmonic_mean_of_finding_the_step_and_of_finding_none() -> None:
    found = processbench(
        [[0.9, 0.2, 0.1], [0.9, 0.4, 0.9], [0.1, 0.9], [0.9, 0.9], [0.9, 0.3], [0.6, 0.6], [0.5, 0.5], [0.9, 0.49]],
        [1, 2, 0, 1, None, None, None, None],
    )
    # Located: the first and the third, of four. All correct: the sixth and seventh, of four.
    assert (found.located, found.all_correct, found.wrong, found.right) == (0.5, 0.5, 4, 4)
    assert found.f1 == pytest.approx(0.5)
    assert found.interval.low < 0.5 < found.interval.high
    skewed = processbench([[0.1], [0.1], [0.9], [0.9], [0.9]], [0, 0, 0, None, None])
    assert skewed.f1 == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    with pytest.raises(ValueError, match="no solution with a wrong step"):
        processbench([[0.9]], [None])
    assert processbench([[0.9], [0.1]], [0, None]).f1 == 0


def test_the_interval_of_f1_covers_it_as_often_as_it_says() -> None:
    rng = random.Random(0)
    located, clean, covered = 0.8, 0.9, 0
    truth = 2 * located * clean / (located + clean)
    for _ in range(200):
        said = [[0.1 if rng.random() < located else 0.9] for _ in range(60)]
        said += [[0.9 if rng.random() < clean else 0.1] for _ in range(60)]
        interval = processbench(said, [0] * 60 + [None] * 60).interval
        covered += interval.low <= truth <= interval.high
    assert covered / 200 >= 0.93


def test_calibration_by_hand() -> None:
    found = calibration([0.05, 0.05, 0.95, 0.85, 1.0], [False, True, True, False, True], bins=10)
    for (count, mean, share), expected in zip(
        found.curve, [(2, 0.05, 0.5), (1, 0.85, 0.0), (2, 0.975, 1.0)], strict=True
    ):
        assert (count, mean, share) == pytest.approx(expected)
    assert found.ece == pytest.approx((2 * 0.45 + 1 * 0.85 + 2 * 0.025) / 5)
    assert found.brier == pytest.approx((0.05**2 + 0.95**2 + 0.05**2 + 0.85**2) / 5)
    with pytest.raises(ValueError, match="0 probabilities"):
        calibration([], [])


def test_a_rate_counts_solutions_and_not_steps() -> None:
    hits = [True] * 10 + [False] * 10
    # Twenty solutions of one step: 10 of 20 is exactly [0.2720, 0.7280]. Two solutions show no spread.
    assert rate(hits, range(20))[1].low == pytest.approx(0.27196, abs=1e-5)
    assert rate(hits, [0] * 10 + [1] * 10)[1].low < 0.01


def test_the_head_reads_the_last_token_of_each_step(tokenizer: Tokenizer) -> None:
    form = DiscriminativeForm(tokenizer, "step")
    (shown,) = form.training(MESSAGES, STEPS, ["+", "-", None])
    texts = [tokenizer.decode(shown.inputs[: place + 1]) for place in shown.scored]
    assert [text.rpartition("<|message|>")[2] for text in texts] == ["4+7=11", "4+7=11\n11+3=14"]
    assert shown.labels == (1, 0)
    # Beside it the first step is learned, with its line break, which the read position leaves to the head.
    learned = tokenizer.decode([shown.targets[place] for place in shown.language])
    assert learned == "4+7=11"
    assert tokenizer.decode(shown.inputs).startswith("<|start|>user<|message|>Sum: 4+7+2<|end|><|start|>assistant")
    assert list(form.question(MESSAGES, STEPS, 500)[0].scored[:2]) == list(shown.scored)


def test_the_head_reads_every_token_of_each_step(tokenizer: Tokenizer) -> None:
    form = DiscriminativeForm(tokenizer, "step", "every")
    (shown,) = form.training(MESSAGES, STEPS, ["+", "-", None])
    first, second = shown.counts
    assert tokenizer.decode([shown.inputs[place] for place in shown.scored[:first]]) == "4+7=11"
    assert tokenizer.decode([shown.inputs[place] for place in shown.scored[first:]]) == "11+3=14"
    assert shown.labels == (1,) * first + (0,) * second
    # The line break after a right step is learned, too: its place is judged and predicts.
    assert tokenizer.decode([shown.targets[place] for place in shown.language]) == "4+7=11\n"
    (asked,) = form.question(MESSAGES, STEPS, 500)
    assert asked.counts[:2] == shown.counts
    assert sum(asked.counts) == len(asked.scored)
    batch = form_batch([[shown], form.training(MESSAGES, STEPS[:1], ["+"])], 0.5)
    assert batch.steps_T is not None
    assert batch.label_weights_T is not None
    assert batch.labels_T is not None
    judged = batch.labels_T >= 0
    assert batch.steps_T[judged].tolist() == [0] * first + [1] * second + [2] * first
    torch.testing.assert_close(batch.label_weights_T, judged / 3)
    assert batch.weights_T.sum().item() == pytest.approx(0.5)


def test_whole_solutions_are_read_at_their_end(tokenizer: Tokenizer) -> None:
    form = DiscriminativeForm(tokenizer, "score")
    (shown,) = form.training(MESSAGES, STEPS, ["0.5"])
    assert shown.scored == (len(shown.inputs) - 1,)
    assert tokenizer.decode(shown.inputs).endswith("so 14\n<|return|>")
    assert (shown.labels, shown.language) == ((1,), ())
    assert len(form.training(MESSAGES, STEPS, ["1"])[0].language) > 10


@pytest.mark.parametrize("mode", ["step", "score"])
def test_a_label_is_the_answer_to_its_task(tokenizer: Tokenizer, mode: Any) -> None:
    form = GenerativeForm(tokenizer, mode)
    group = form.training(MESSAGES, STEPS, ["+", "-", None] if mode == "step" else ["0"])
    said = [tokenizer.decode([shown.targets[place] for place in shown.scored]) for shown in group]
    answers = ["+", "-"] if mode == "step" else ["0"]
    assert said == [f"<|channel|>final<|message|>{answer}<|return|>" for answer in answers]
    prompts = [tokenizer.decode(shown.inputs[: shown.scored[0] + 1]) for shown in group]
    assert [prompt.count("11+3=14") for prompt in prompts] == ([0, 1] if mode == "step" else [1])
    for shown in group:
        (message,) = Harmony(tokenizer).parse_completion([shown.targets[place] for place in shown.scored]).messages
        assert message.channel == "final"
    if mode == "step":
        assert tokenizer.decode([group[0].targets[place] for place in group[0].language]) == "4+7=11"
        assert group[1].language == ()


def test_a_label_of_several_tokens_is_refused() -> None:
    class Spelled:
        """Every character with a space before it."""

        vocab_size = 300

        def encode(self, text: str) -> list[int]:
            return [byte for character in text for byte in (32, *character.encode())]

        def decode(self, ids: Any) -> str:
            return ""

        def special_id(self, token: str) -> int:
            return 299

    with pytest.raises(UserError, match="the label '-' of a step is 2 tokens in this tokenizer, and has to be one"):
        make_form(Spelled(), "generative", "step", neutral=False)


def test_weights_are_means_over_judgements_and_over_tokens(tokenizer: Tokenizer) -> None:
    form = DiscriminativeForm(tokenizer, "step")
    groups = [form.training(MESSAGES, STEPS, ["+", "-", None]), form.training(MESSAGES, STEPS[:1], ["+"])]
    batch = form_batch(groups, 0.5)
    assert batch.labels_T is not None
    judged = batch.labels_T >= 0
    assert int(judged.sum()) == 3
    torch.testing.assert_close(batch.weights_T[judged], torch.full((3,), 1 / 3))
    language = batch.scored_T & ~judged
    assert int(language.sum()) == sum(len(group[0].language) for group in groups)
    assert batch.weights_T[language].sum().item() == pytest.approx(0.5)
    alone = form_batch(groups)
    assert torch.equal(alone.scored_T, judged)


def test_probabilities_are_those_of_the_labels_against_one_another(model: Transformer, tokenizer: Tokenizer) -> None:
    for mode in ("step", "score"):
        form = GenerativeForm(tokenizer, mode)  # type: ignore[arg-type]
        said = Judge(model, None, form).probabilities([(MESSAGES, STEPS), (MESSAGES, STEPS[:1])])
        assert [tuple(one.shape) for one in said] == ([(3, 2), (1, 2)] if mode == "step" else [(1, 3), (1, 3)])
        # One sequence at a time, nothing shared.
        for one, steps in zip(said, (STEPS, STEPS[:1]), strict=True):
            sums = [
                batch_logprobs(model, form_batch([[shown]]), 4096, 1.0).sum()
                for shown in form.question(MESSAGES, steps, 256)
            ]
            torch.testing.assert_close(one, torch.stack(sums).view(one.shape).softmax(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reads", ["last", "every"])
def test_one_pass_says_of_each_step_what_its_prefix_alone_would(
    model: Transformer, tokenizer: Tokenizer, reads: Any
) -> None:
    head = Head(32, 2, "step")
    torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    judge = Judge(model, head, DiscriminativeForm(tokenizer, "step", reads))
    (whole,) = judge.probabilities([(MESSAGES, STEPS)])
    parts = judge.probabilities([(MESSAGES, STEPS[:count]) for count in (1, 2, 3)])
    torch.testing.assert_close(whole, torch.stack([part[-1] for part in parts]), atol=1e-5, rtol=1e-4)
    assert len({round(float(p), 4) for p in whole[:, 0]}) == 3


@pytest.mark.parametrize(("head", "reads"), [(None, "last"), ("step", "last"), ("step", "every")])
def test_what_does_not_fit_is_not_right(model: Transformer, tokenizer: Tokenizer, head: Any, reads: Any) -> None:
    form = GenerativeForm(tokenizer, "step") if head is None else DiscriminativeForm(tokenizer, "step", reads)
    judge = Judge(model, head and Head(32, 2, "step"), form)
    (said,) = judge.probabilities([(MESSAGES, ["4+7=11"] * 60)])
    assert said.shape == (60, 2)
    assert float(said[0, 1]) > 0.01
    assert torch.equal(said[-1], torch.tensor([1.0, 0.0]))
    (nothing,) = judge.probabilities([([Message("user", "4+7 " * 300)], ["4+7=11"])])
    assert torch.equal(nothing, torch.tensor([[1.0, 0.0]]))


def test_an_answer_is_as_good_as_all_its_steps(model: Transformer, tokenizer: Tokenizer) -> None:
    head = Head(32, 2, "step")
    torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    judge = Judge(copy.deepcopy(model), head, DiscriminativeForm(tokenizer, "step"))
    scorer = Verifier(judge, "step")

    async def ask() -> tuple[list[float], list[float], float]:
        steps = await scorer.step_scores(MESSAGES, STEPS)
        scores = await asyncio.gather(
            scorer.score(MESSAGES, "4+7=11\n\n 11+3=14\nso 14\n"), scorer.score(MESSAGES, "4+7=11")
        )
        return steps, list(scores), await scorer.score(MESSAGES, " \n")

    steps, (whole, first), nothing = asyncio.run(ask())
    (said,) = judge.probabilities([(MESSAGES, STEPS)])
    assert steps == pytest.approx(said[:, 1].tolist(), abs=1e-5)
    assert whole == pytest.approx(steps[0] * steps[1] * steps[2])
    assert first == pytest.approx(steps[0], abs=1e-5)
    assert nothing == 0


def test_a_score_is_the_one_expected(model: Transformer, tokenizer: Tokenizer) -> None:
    judge = Judge(copy.deepcopy(model), None, GenerativeForm(tokenizer, "score"))
    value = asyncio.run(Verifier(judge, "score").score(MESSAGES, "\n".join(STEPS)))
    (said,) = judge.probabilities([(MESSAGES, STEPS)])
    assert value == pytest.approx(float(said[0] @ torch.tensor([0.0, 0.5, 1.0])), abs=1e-5)


def test_the_description_says_which_tokens_are_read(tmp_path: Path) -> None:
    Description("step", "discriminative", neutral=False, reads="every").save(tmp_path)
    assert Description.load(tmp_path).reads == "every"
    file = tmp_path / "verifier.json"
    for reads in ("", ', "reads": "most"'):
        file.write_text(f'{{"mode": "step", "head": "discriminative", "neutral": false{reads}}}')
        with pytest.raises(UserError, match="not the description of a verifier"):
            Description.load(tmp_path)


def test_a_verifier_of_solutions_judges_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Transformer, tokenizer: Tokenizer
) -> None:
    (tmp_path / "config.json").write_text("{}")
    Description("score", "generative", neutral=False).save(tmp_path)
    judge = Judge(copy.deepcopy(model), None, GenerativeForm(tokenizer, "score"))
    monkeypatch.setattr(Judge, "load", lambda path, device: (judge, Description.load(path)))
    assert isinstance(load_scorer(tmp_path), Verifier)
    with pytest.raises(
        UserError, match="scores whole solutions, and steps are to be judged; train one with --mode=step"
    ):
        load_step_scorer(tmp_path)
