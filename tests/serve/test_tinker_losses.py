"""Tinker's losses in NumPy, written from their documentation: values, and gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nmoe.learner.objectives import Outputs
from nmoe.learner.passes import scored_columns
from nmoe.serve.tinker.data import Datum
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.losses import batch_of, check_inputs, read_loss

Vector = NDArray[np.float64]
Loss = Callable[[Vector, dict[str, Vector], dict[str, float]], float]

# Beyond both bounds, within them, and far beyond, with advantages of both signs.
LOG_RATIOS = np.array([-0.9, -0.5, -0.1, 0.0, 0.1, 0.5, 0.9, -0.9, -0.5, -0.1, 0.0, 0.1, 0.5, 3.0])
ADVANTAGES = np.array([1.0, 0.5, 2.0, 1.5, 1.0, 0.5, 2.0, -1.0, -0.5, -2.0, -1.5, -1.0, -0.5, -2.0])
SIZES = (5, 9)


def _clipped(ratio: Vector, advantages: Vector, low: float, high: float) -> float:
    return float(-np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages).sum())


def importance_sampling(p: Vector, given: dict[str, Vector], settings: dict[str, float]) -> float:
    return float(-(np.exp(p - given["logprobs"]) * given["advantages"]).sum())


def ppo(p: Vector, given: dict[str, Vector], settings: dict[str, float]) -> float:
    low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
    return _clipped(np.exp(p - given["logprobs"]), given["advantages"], low, high)


def cispo(p: Vector, given: dict[str, Vector], settings: dict[str, float]) -> float:
    """The clipped ratio is a constant: `given` has that of the point at which the gradient is taken."""
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 4.0)
    return float(-(np.clip(np.exp(given["here"] - given["logprobs"]), low, high) * p * given["advantages"]).sum())


def dro(p: Vector, given: dict[str, Vector], settings: dict[str, float]) -> float:
    return float(-(p * given["advantages"] - settings["beta"] / 2 * (p - given["logprobs"]) ** 2).sum())


def gspo(p: Vector, given: dict[str, Vector], settings: dict[str, float]) -> float:
    """The sequence's ratio has each token's gradient, and is a constant otherwise."""
    low, high = settings.get("clip_low_threshold", 1 - 3e-4), settings.get("clip_high_threshold", 1 + 4e-4)
    counted = given["sequence_ratio_mask"] == 1
    mean = (given["here"] - given["logprobs"])[counted].mean()
    ratio = np.exp(mean) * np.exp(p - given["here"])
    return _clipped(ratio[counted], given["advantages"][counted], low, high)


def cross_entropy(p: Vector, given: dict[str, Vector], settings: dict[str, float]) -> float:
    return float(-(given["weights"] * p).sum())


WIDE = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
CASES: list[tuple[Loss, dict[str, float]]] = [
    (cross_entropy, {}),
    (importance_sampling, {}),
    (ppo, {}),
    (ppo, WIDE),
    (cispo, {}),
    (cispo, WIDE),
    (dro, {"beta": 0.3}),
    (gspo, {}),
    (gspo, WIDE),
]


def columns(loss: Loss) -> tuple[Vector, list[Datum], list[dict[str, Vector]]]:
    """Returns log-probabilities p, the data of two sequences, and their columns."""
    rng = np.random.default_rng(0)
    p = rng.uniform(-3, -0.1, len(LOG_RATIOS))
    data, given = [], []
    for part in np.split(np.arange(len(p)), [SIZES[0]]):
        mask = np.ones(len(part)) if loss is not gspo else (np.arange(len(part)) > 1).astype(float)
        of: dict[str, Vector] = {"logprobs": (p - LOG_RATIOS)[part], "advantages": ADVANTAGES[part] * mask}
        if loss is gspo:
            of["sequence_ratio_mask"] = mask
        if loss is cross_entropy:
            of = {"weights": ADVANTAGES[part]}
        ids = np.arange(len(part), dtype=np.int32)
        inputs: dict[str, Any] = {name: column.astype(np.float32) for name, column in of.items()}
        data.append(Datum(ids, {"target_tokens": ids.astype(np.int64), **inputs}))
        given.append(of | {"here": p[part]})
    return p, data, given


@pytest.mark.parametrize(("loss", "settings"), CASES)
def test_value_and_gradient(loss: Loss, settings: dict[str, float]) -> None:
    p, data, given = columns(loss)
    name = loss.__name__
    check_inputs(data, name)
    batch = batch_of(data, name)
    logprobs_N = torch.tensor(p, dtype=torch.float32, requires_grad=True)
    total, _ = read_loss(name, settings)(Outputs(logprobs_N, torch.zeros(len(p))), scored_columns(batch))
    total.backward()

    def expected(at: Vector) -> float:
        return sum(loss(part, of, settings) for part, of in zip(np.split(at, [SIZES[0]]), given, strict=True))

    assert total.item() == pytest.approx(expected(p), rel=1e-5)
    step = 1e-6
    shifts = np.eye(len(p)) * step
    gradient = np.array([(expected(p + shift) - expected(p - shift)) / (2 * step) for shift in shifts])
    assert logprobs_N.grad is not None
    np.testing.assert_allclose(logprobs_N.grad.numpy(), gradient, rtol=1e-4, atol=1e-4)
    if settings is WIDE and loss is ppo:
        assert (gradient == 0).sum() == 3, "of those that gain from leaving the bounds none has a gradient"


def test_a_mask_of_parts_is_refused() -> None:
    _, data, _ = columns(gspo)
    data[1].inputs["sequence_ratio_mask"][3] = 0.5
    with pytest.raises(TinkerError, match=r"data\[1\].loss_fn_inputs.sequence_ratio_mask: must be 0 or 1"):
        check_inputs(data, "gspo")
