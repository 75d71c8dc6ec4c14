"""Batches of preference pairs: what is scored and shared, and whole losses and gradients against TRL's trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, peaked_model

from nmoe.config.tables.model import OptimizerSection
from nmoe.data.pairs import Pair
from nmoe.learner.learner import Learner
from nmoe.learner.objectives.bradley_terry import bradley_terry
from nmoe.learner.objectives.dpo import PreferenceLoss, dpo
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.config import ModelConfig
from nmoe.model.head import Head
from nmoe.recipes.preferences import completion_batch, last_token_batch, reward_batch
from nmoe.text.renderers import IGNORED, Rendered
from nmoe.text.tokenizer import Tokenizer

# Completions of several lengths, one the beginning of the other.
SIDES = [
    ([5, 6], [7, 2], [7, 9, 2]),
    ([11, 12, 13, 14], [15, 16, 17, 18, 19, 2], [20, 2]),
    ([21], [22, 23], [22, 23, 24, 25]),
]


def side(prompt: list[int], completion: list[int]) -> Rendered:
    return Rendered(prompt + completion, [IGNORED] * len(prompt) + completion)


PAIRS = [Pair("here", side(prompt, chosen), side(prompt, rejected)) for prompt, chosen, rejected in SIDES]


def test_all_of_both_completions_is_scored() -> None:
    batch = completion_batch(PAIRS[:1])
    assert batch.lengths == (3, 4)
    assert batch.inputs_T.tolist() == [5, 6, 7, 5, 6, 7, 9]
    assert batch.targets_T.tolist() == [6, 7, 2, 6, 7, 9, 2]
    assert batch.scored_T.tolist() == [False, True, True, False, True, True, True]
    torch.testing.assert_close(batch.weights_T, torch.tensor([0, 1 / 4, 1 / 4, 0, 1 / 6, 1 / 6, 1 / 6]))
    assert batch.pairs == ((0, True), (0, False))
    assert batch.prefixes == ((0, 3), (0, 3))


def test_a_reward_is_read_at_the_last_token() -> None:
    batch = reward_batch(PAIRS[:1])
    assert batch.inputs_T.tolist() == [5, 6, 7, 2, 5, 6, 7, 9, 2]
    assert batch.scored_T.nonzero().flatten().tolist() == [3, 8]
    assert batch.weights_T[batch.scored_T].tolist() == [0.5, 0.5]
    assert batch.pairs == ((0, True), (0, False))
    alone = last_token_batch([[5, 6, 7, 2], [5, 6, 7, 9, 2]])
    assert alone.inputs_T.tolist() == batch.inputs_T.tolist()
    assert alone.scored_T.tolist() == batch.scored_T.tolist()
    assert (alone.pairs, alone.prefixes) == (None, None)


def test_what_a_policy_did_not_say_is_not_scored() -> None:
    """A tool's answer between two turns, and a stop token that is another in the history."""
    ids, labels = [5, 6, 7, 8, 9, 2], [IGNORED, IGNORED, 7, 30, IGNORED, 2]
    batch = completion_batch([Pair("here", Rendered(ids, labels), side([5, 6], [9, 2]))])
    assert batch.inputs_T.tolist()[:5] == ids[:-1]
    assert batch.targets_T[:5][batch.scored_T[:5]].tolist() == [7, 30, 2]
    assert batch.scored_T.tolist()[:5] == [False, True, True, False, True]


def learner(model: Any, tokens: int = 1000, head: Head | None = None) -> Learner:
    return Learner(model, OptimizerSection(learning_rate=1e-3), 1, tokens, head=head, head_only=head is not None)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_neither_sharing_nor_splitting_changes_anything() -> None:
    found = []
    for tokens, shares in ((1000, True), (1000, False), (8, True)):
        model = peaked_model(ModelConfig(**FAMILIES["llama"]))
        batch = completion_batch(PAIRS)
        batch = batch if shares else replace(batch, prefixes=None)
        batch = batch.with_reference(torch.linspace(-2, -1, int(batch.scored_T.sum())))
        result = learner(model, tokens).forward_backward(batch, dpo("sigmoid", 0.5, sft_weight=0.1)).result()
        found.append((result.loss, gradients(model)))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)


# --- TRL


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, another as its reference, and a tokenizer, as transformers reads them."""
    here = tmp_path_factory.mktemp("trl")
    for name, seed in (("policy", 0), ("reference", 1)):
        export_model(peaked_model(ModelConfig(**FAMILIES["llama"]), seed), here / name)
    Tokenizer.train(["a b c"] * 3, 300).save(here / "tokenizer")
    return here


@pytest.fixture(scope="module")
def trainer(here: Path) -> Iterator[Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    policy, reference = (AutoModelForCausalLM.from_pretrained(here / name) for name in ("policy", "reference"))
    return DPOTrainer(
        model=policy,
        ref_model=reference,
        args=DPOConfig(output_dir=str(here / "out"), use_cpu=True, bf16=False, report_to=[]),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(here / "tokenizer"),
    )


def as_nmoe(trunk: Any, here: Path, path: Path) -> dict[str, torch.Tensor]:
    """The gradients of a trunk of transformers under the names that they have here: stored as the weights of a model, and read."""
    from transformers import AutoModelForCausalLM

    stored = AutoModelForCausalLM.from_pretrained(here / "policy")
    stored.model.load_state_dict({name: parameter.grad for name, parameter in trunk.named_parameters()})
    stored.save_pretrained(path)
    trunk.zero_grad()
    return {name: parameter.detach() for name, parameter in load_model(path).named_parameters()}


Gradients = dict[str, torch.Tensor]


def largest_errors(found: Gradients, true: Gradients) -> dict[str, float]:
    """Of each tensor, as a share of its largest number."""
    assert found.keys() == true.keys()
    return {name: float((found[name] - right).abs().max() / right.abs().max()) for name, right in true.items()}


def assert_same(ours: Gradients, theirs: Gradients, true: Gradients) -> None:
    """Both round in fp32, each in its own order, and how much that is depends on the machine: so ours are held against the same in
    fp64, and theirs too, at a few times the worst of ours. A wrong formula is off by 1e-3 and more."""
    assert max(float(gradient.abs().max()) for gradient in true.values()) > 1e-2
    rounding = max(largest_errors(ours, true).values())
    assert 0 < rounding < 2e-5
    assert max(largest_errors(theirs, true).values()) < 10 * rounding


@pytest.mark.parametrize(
    ("loss", "beta", "smoothing", "sft"),
    [
        ("sigmoid", 0.3, 0.0, 0.0),
        ("sigmoid_norm", 1.5, 0.0, 0.0),
        ("robust", 0.3, 0.2, 0.0),
        ("hinge", 0.3, 0.0, 0.0),
        ("ipo", 0.4, 0.0, 0.0),
        ("sigmoid", 0.3, 0.0, 0.7),
    ],
)
def test_losses_and_gradients_are_those_of_trl(
    loss: PreferenceLoss, beta: float, smoothing: float, sft: float, here: Path, trainer: Any, tmp_path: Path
) -> None:
    # TRL's own likelihood term is a mean over tokens of the batch, ours over pairs: one where there is one pair.
    pairs = PAIRS[:1] if sft else PAIRS
    trainer.loss_types, trainer.loss_weights = ([loss, "sft"], [1.0, sft]) if sft else ([loss], [1.0])
    trainer.beta, trainer.label_smoothing = beta, smoothing
    rows = [
        dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), sides, strict=True)) for sides in SIDES[: len(pairs)]
    ]
    theirs = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    theirs.backward()
    expected = as_nmoe(trainer.model.model, here, tmp_path)

    def of_ours(dtype: torch.dtype) -> tuple[float, Gradients]:
        batch = completion_batch(pairs)
        reference = learner(load_model(here / "reference").to(dtype))
        batch = batch.with_reference(reference.logprobs(batch).result())
        policy = load_model(here / "policy").to(dtype)
        result = learner(policy).forward_backward(batch, dpo(loss, beta, smoothing, sft)).result()
        return result.loss, gradients(policy)

    (our_loss, ours), (true_loss, true) = of_ours(torch.float32), of_ours(torch.float64)
    assert our_loss == pytest.approx(true_loss, rel=1e-5)
    assert theirs.item() == pytest.approx(true_loss, rel=1e-5)
    assert_same(ours, expected, true)


@pytest.mark.parametrize(("margin", "centering"), [(0.0, 0.0), (0.3, 0.05)])
def test_bradley_terry_is_that_of_trl(margin: float, centering: float, here: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(here / "policy", num_labels=1)
    options = {"center_rewards_coefficient": centering} if centering else {}
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[], **options),
        train_dataset=Dataset.from_list([{"chosen": "b", "rejected": "c"}]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(here / "tokenizer"),
    )
    rows = [{"chosen_ids": pair.chosen.ids, "rejected_ids": pair.rejected.ids, "margin": margin} for pair in PAIRS]
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    theirs = trainer.compute_loss(model, trainer.data_collator(rows))
    theirs.backward()

    def of_ours(dtype: torch.dtype) -> tuple[float, Gradients]:
        policy = load_model(here / "policy").to(dtype)
        head = Head(policy.config.hidden_size, 1, "reward")
        head.load_state_dict({"weight": model.score.weight.detach(), "bias": torch.zeros(1)})
        objective = bradley_terry(margin, centering)
        result = learner(policy, head=head.to(dtype)).forward_backward(reward_batch(PAIRS), objective).result()
        assert head.weight.grad is not None
        return result.loss, gradients(policy) | {"score": head.weight.grad}

    (our_loss, ours), (true_loss, true) = of_ours(torch.float32), of_ours(torch.float64)
    assert our_loss == pytest.approx(true_loss, rel=1e-5)
    assert theirs.item() == pytest.approx(true_loss, rel=1e-5)
    head_gradient = model.score.weight.grad
    assert head_gradient is not None
    assert_same(ours, as_nmoe(model.model, here, tmp_path / "gradients") | {"score": head_gradient}, true)
