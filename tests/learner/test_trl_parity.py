"""Policy losses against TRL's: the same logits, the same batch, TRL's own loss method, values and gradients by both."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nmoe.learner.batch import Aggregation, token_weights
from nmoe.learner.objectives import (
    Objective,
    Outputs,
    Scored,
    cispo,
    clip,
    entropy_bonus,
    gspo,
    reference_divergence,
    total,
)
from nmoe.model.logprobs import head_logprobs
from nmoe.rl.correction import Correction, correction_weights

SEQUENCES, LENGTH, VOCABULARY = 5, 6, 7
LONGEST = 10  # what TRL calls max_completion_length


@pytest.fixture(scope="module")
def samples() -> dict[str, Tensor]:
    """Sequences of unlike lengths, a tool's answer within one; policies far enough apart that every bound is met."""
    generator = torch.Generator().manual_seed(3)

    def logprobs(around: Tensor, spread: float) -> Tensor:
        return around + spread * torch.randn(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64)

    logits = torch.randn(SEQUENCES, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    now = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    mask = torch.arange(LENGTH) < torch.tensor([6, 1, 4, 2, 5]).unsqueeze(-1)
    mask[0, 2:4] = False
    old = logprobs(now, 0.5)
    return {
        "logits": logits,
        "tokens": tokens,
        "mask": mask,
        "old": old,
        "behaviour": logprobs(old, 0.4),
        "reference": logprobs(now, 0.7),
        "advantages": torch.tensor([1.3, -0.8, 0.0, -2.0, 0.6], dtype=torch.float64),
    }


def of_trl(samples: dict[str, Tensor], weights_BT: Tensor | None = None, **settings: Any) -> tuple[float, Tensor]:
    """Loss and gradient of the logits by the loss method of TRL's GRPOTrainer, which is handed the logits where it would run its
    model, and stand-ins for the distribution and the metrics around it."""
    from trl import GRPOTrainer
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = samples["logits"].clone().requires_grad_()

    def forward(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return selective_log_softmax(logits, samples["tokens"]), entropy_from_logits(logits), None

    own: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.3,
        "beta": 0.0,
        "entropy_coef": 0.0,
    }
    delta, weighted_kl = settings.pop("delta", None), settings.pop("use_bias_correction_kl", False)
    own |= settings
    model = SimpleNamespace(training=True)
    trainer = SimpleNamespace(
        **own,
        model=model,
        _get_per_token_logps_and_entropies=forward,
        args=SimpleNamespace(use_bias_correction_kl=weighted_kl, delta=delta, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weights_BT is not None,
        vllm_importance_sampling_correction=weights_BT is not None,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=own["entropy_coef"] != 0,
        _metrics={"train": defaultdict(list)},
    )
    mask = samples["mask"].long()
    inputs = {
        "prompt_ids": torch.zeros(SEQUENCES, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(SEQUENCES, 1, dtype=torch.int64),
        "completion_ids": samples["tokens"],
        "completion_mask": mask,
        "advantages": samples["advantages"],
        "old_per_token_logps": samples["old"],
        "ref_per_token_logps": samples["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights_BT,
    }
    loss = GRPOTrainer._compute_loss(trainer, model, inputs)
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad


def of_ours(
    samples: dict[str, Tensor], objective: Objective, aggregation: Aggregation, weights_N: Tensor | None = None
) -> tuple[float, Tensor]:
    logits = samples["logits"].clone().requires_grad_()
    mask = samples["mask"]
    lengths = [LENGTH] * SEQUENCES
    targets_N = samples["tokens"][mask]
    advantages_N = samples["advantages"].unsqueeze(-1).expand(-1, LENGTH)[mask]
    outputs = Outputs(*head_logprobs(logits[mask], torch.eye(VOCABULARY, dtype=torch.float64), targets_N))
    scored = Scored(
        weights_N=token_weights(aggregation, mask.flatten(), lengths, LONGEST)[mask.flatten()].double(),
        advantages_N=advantages_N if weights_N is None else advantages_N * weights_N,
        behaviour_logprobs_N=samples["behaviour"][mask],
        old_logprobs_N=samples["old"][mask],
        reference_logprobs_N=samples["reference"][mask],
        sequence_N=sequence_of_token(mask),
    )
    loss, _ = objective(outputs, scored)
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad


def sequence_of_token(mask: Tensor) -> Tensor:
    return torch.arange(SEQUENCES).unsqueeze(-1).expand(-1, LENGTH)[mask]


@pytest.mark.parametrize(
    ("objective", "aggregation", "theirs"),
    [
        (clip(0.2, 0.3), "sequence", {}),
        (clip(0.2, 0.3), "token", {"loss_type": "dapo"}),
        (clip(0.2, 0.3), "constant", {"loss_type": "dr_grpo"}),
        (clip(0.2, 0.3, dual_clip=1.5), "sequence", {"delta": 1.5}),
        (
            gspo(0.03, 0.04),
            "sequence",
            {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        ),
        (cispo(0.5), "token", {"loss_type": "cispo", "epsilon_high": 1.5}),
        (total(clip(0.2, 0.3), reference_divergence(0.05, "k3", weighted=False)), "sequence", {"beta": 0.05}),
        (total(clip(0.2, 0.3), entropy_bonus(0.1)), "token", {"loss_type": "dapo", "entropy_coef": 0.1}),
        (
            total(cispo(0.5), reference_divergence(0.05, weighted=False), entropy_bonus(0.1)),
            "token",
            {"loss_type": "cispo", "epsilon_high": 1.5, "beta": 0.05, "entropy_coef": 0.1},
        ),
    ],
    ids=["grpo", "dapo", "dr_grpo", "dual_clip", "gspo", "cispo", "divergence", "entropy", "all"],
)
def test_losses_and_gradients_are_those_of_trl(
    samples: dict[str, Tensor], objective: Objective, aggregation: Aggregation, theirs: dict[str, Any]
) -> None:
    loss, gradient = of_ours(samples, objective, aggregation)
    expected_loss, expected_gradient = of_trl(samples, **theirs)
    # Our weights are made in fp32 and theirs in fp64.
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-8)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-8)
    assert gradient.abs().max() > 0.01


def test_a_weighed_divergence_is_that_of_trl(samples: dict[str, Tensor]) -> None:
    """TRL's ratio is to the policy before the update, here the one that sampled."""
    sampled_by_it = samples | {"behaviour": samples["old"]}
    loss, gradient = of_ours(sampled_by_it, total(clip(0.2, 0.3), reference_divergence(0.05)), "sequence")
    expected_loss, expected_gradient = of_trl(samples, beta=0.05, use_bias_correction_kl=True)
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-8)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("correction", ["tis", "mask", "sequence_mask"])
def test_a_corrected_advantage_is_trl_s_corrected_loss(samples: dict[str, Tensor], correction: Correction) -> None:
    mask = samples["mask"]
    weights = correction_weights(
        correction,
        samples["old"][mask],
        samples["behaviour"][mask],
        sequence_of_token(mask),
        cap=1.2,
        window=(0.8, 1.2),
    )
    weights_N, statistics = weights.weights_N.to(samples["old"]), weights.metrics()
    assert 0 < statistics["correction_clipped" if correction == "tis" else "correction_masked"] < 1
    weights_BT = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, weights_N)
    # Neither the divergence nor the denominator sees the weights, there as here.
    objective = total(clip(0.2, 0.3), reference_divergence(0.05, weighted=False))
    loss, gradient = of_ours(samples, objective, "sequence", weights_N)
    expected_loss, expected_gradient = of_trl(samples, weights_BT, beta=0.05)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-8)
