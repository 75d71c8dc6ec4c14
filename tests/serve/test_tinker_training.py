"""Tinker's losses over the wire, against transformers and PEFT with the formulas written out; and the state that clients save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from served_client import Client, serving
from tinker_client import Model, Tinker, arrays, datum
from torch import Tensor
from transformers import AutoModelForCausalLM

from nmoe.serve.tinker.messages import FLOAT32, INT64, message

TOKENS = [[40, 41, 42, 43, 44, 45], [40, 41, 42, 50, 51], [7, 8, 9, 10, 11, 12, 13, 14]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def server(checkpoint: Path, saved: Path) -> Iterator[Client]:
    with serving(checkpoint, "--tinker", "--numerics", "exact", "--saved", str(saved)) as running:
        yield running


@pytest.fixture
def client(server: Client) -> Tinker:
    return Tinker(server.http)


def stored(model: Model, saved: Path, checkpoint: Path, name: str) -> PeftModel:
    """Returns the model's present weights as PEFT loads them."""
    model.save("save_weights", name)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return PeftModel.from_pretrained(base, saved / model.model_id / "weights" / name, is_trainable=True)


def logprobs(model: Any, token_ids: list[int]) -> Tensor:
    """Returns the log-probability of each token but the first."""
    ids = torch.tensor([token_ids])
    return model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def ppo(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def written_out(name: str, lp: Tensor, q: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = (lp - q).exp()
    if name == "gspo":
        mean = ((lp - q).detach() * mask).sum() / mask.sum()
        return ppo((mean + lp - lp.detach()).exp(), advantages, 0.9, 1.1)
    return {
        "importance_sampling": lambda: -(ratio * advantages).sum(),
        "ppo": lambda: ppo(ratio, advantages, 0.9, 1.1),
        "cispo": lambda: -(ratio.clamp(0.9, 1.1).detach() * lp * advantages).sum(),
        "dro": lambda: -(lp * advantages - 0.3 / 2 * (lp - q) ** 2).sum(),
    }[name]()


CLIPPED = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
SETTINGS: dict[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": CLIPPED,
    "cispo": CLIPPED,
    "gspo": CLIPPED,
    "dro": {"beta": 0.3},
}


def moved(model: Model) -> None:
    """Takes a step, so that B is not zero, and A has a gradient, too."""
    model.run([datum(TOKENS[0][:-1], target_tokens=TOKENS[0][1:], weights=[1.0] * 5)], "cross_entropy")
    model.step()


@pytest.mark.parametrize("name", SETTINGS)
def test_policy_losses(name: str, client: Tinker, saved: Path, checkpoint: Path) -> None:
    model = client.model(train_mlp=False)
    moved(model)
    theirs = stored(model, saved, checkpoint, "here")
    rng = np.random.default_rng(0)
    data, total = [], torch.zeros(())
    for ids in TOKENS:
        lp = logprobs(theirs, ids)
        mask = torch.tensor([0.0, 0.0] + [1.0] * (len(ids) - 3))
        q = lp.detach() + torch.from_numpy(rng.normal(0, 0.2, len(ids) - 1).astype(np.float32))
        advantages = torch.from_numpy(rng.normal(0, 1, len(ids) - 1).astype(np.float32)) * mask
        total = total + written_out(name, lp, q, advantages, mask)
        masked = {"sequence_ratio_mask": mask.numpy()} if name == "gspo" else {}
        data.append(datum(ids[:-1], target_tokens=ids[1:], logprobs=q.numpy(), advantages=advantages.numpy(), **masked))
    result = model.run(data, name, **SETTINGS[name])
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    (record,) = result.loss_fn_outputs
    assert record.num_datums == 3
    for ids, found in zip(TOKENS, arrays(record, "logprobs"), strict=True):
        np.testing.assert_allclose(found, logprobs(theirs, ids).detach(), atol=1e-4)
    only = model.run(data, name, forward_only=True, **SETTINGS[name])
    assert only.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters() if p.grad is not None])
    assert model.step()["grad_norm"] == pytest.approx(norm.item(), rel=1e-3), "the pass without gradient added none"


def test_cross_entropy_with_any_weights_and_targets(client: Tinker, saved: Path, checkpoint: Path) -> None:
    """Two targets for each token, one sequence of them sparse, and weights of both signs; gradients of two passes add up."""
    model = client.model(train_mlp=False)
    moved(model)
    theirs = stored(model, saved, checkpoint, "here")
    ids, targets = TOKENS[2][:-1], np.array([[8, 3], [9, 0], [10, 5], [11, 0], [12, 6], [13, 7], [14, 0]])
    weights = np.where(targets > 0, [0.5, -0.25], 0).astype(np.float32)
    every = theirs(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    total = -(every.gather(1, torch.from_numpy(targets)) * torch.from_numpy(weights)).sum()
    rows, columns = np.nonzero(targets)
    begins = np.searchsorted(rows, np.arange(8))

    def sparse(values: Any, dtype: int) -> Any:
        made = message("Tensor")(dtype=dtype, shape=targets.shape)
        made.sparse_csr.values = values[rows, columns].tobytes()
        made.sparse_csr.crow_indices = begins.astype("<i8").tobytes()
        made.sparse_csr.col_indices = columns.astype("<i8").tobytes()
        return made

    dense = datum(ids, target_tokens=targets, weights=weights)
    thin = datum(ids, target_tokens=sparse(targets, INT64), weights=sparse(weights, FLOAT32))
    found = [model.run([one], "cross_entropy") for one in (dense, thin)]
    for one in found:
        assert one.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
        (logprobs_n2,) = arrays(one.loss_fn_outputs[0], "logprobs")
        np.testing.assert_allclose(logprobs_n2, every.gather(1, torch.from_numpy(targets)).detach(), atol=1e-4)
    (2 * total).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters() if p.grad is not None])
    assert model.step()["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def trained(model: Model, steps: int = 1) -> list[float]:
    """Takes steps, and returns the loss before each."""
    losses = []
    for _ in range(steps):
        one = datum(TOKENS[1][:-1], target_tokens=TOKENS[1][1:], weights=[1.0] * 4)
        losses.append(model.run([one], "cross_entropy").metrics["loss:sum"])
        model.step()
    return losses


def test_state_goes_on_where_it_was_saved(client: Tinker) -> None:
    model = client.model()
    trained(model, 2)
    path = model.save("save_weights", "two")["path"]
    assert path == f"tinker://{model.model_id}/weights/two"
    ahead = trained(model, 3)
    restored = Model(client, f"{client.session_id}:train:{(number := next(client.numbers))}")
    load = {"session_id": client.session_id, "model_seq_id": number, "path": path}
    assert client.wait(client.post("load_weights", **load, optimizer=True))["model_id"] == restored.model_id
    assert trained(restored, 3) == ahead
    weights_alone = client.post("load_weights", **restored.next(), path=path, optimizer=False)
    client.wait(weights_alone)
    fresh = trained(restored, 2)
    assert fresh[0] == ahead[0]
    assert fresh[1] != ahead[1], "the moments are new"


def test_models_are_apart(client: Tinker) -> None:
    alone = client.model()
    expected = trained(alone, 3)
    one, other = client.model(), client.model(rank=2, train_attn=False)
    found = []
    for _ in range(3):
        found += trained(one)
        trained(other)
    assert found == expected


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss": "stable_reinforce"}, "its objective is not published; send one of cross_entropy"),
        ({"loss": "ppo", "epsilon": 0.2}, "loss_fn_config.epsilon: ppo has no such setting"),
        ({"loss": "dro"}, "loss_fn_config.beta: is missing"),
        ({"loss": "importance_sampling"}, "loss_fn_inputs.advantages: is missing"),
        ({"ids": [40, 41, 10_000_000, 43, 44]}, "token ids lie in 0.."),
        ({"ids": b"\0\0\0"}, "3 bytes are no token ids"),
        ({"ids": [40, 41]}, "has (5,) entries, and model_input 2 tokens"),
        ({"weights": [1.0, float("nan"), 1, 1, 1]}, "holds NaN"),
    ],
)
def test_bad_data_fail_in_their_turn(change: dict[str, Any], why: str, client: Tinker) -> None:
    model = client.model()
    losses = trained(model)
    given = {"loss": "cross_entropy", "ids": TOKENS[0][:-1], "weights": [1.0] * 5} | change
    one = datum(given.pop("ids"), target_tokens=TOKENS[0][1:], weights=given.pop("weights"))
    failed = model.run([one], given.pop("loss"), **given)
    assert failed["category"] == "user"
    assert why in failed["error"]
    assert trained(model)[0] < losses[0], "the model goes on"


def test_a_gradient_that_is_not_finite_is_forgotten(client: Tinker) -> None:
    model = client.model()
    losses = trained(model)
    one = datum(TOKENS[1][:-1], target_tokens=TOKENS[1][1:], weights=[3e38] * 4)
    model.run([one], "cross_entropy")
    failed = client.wait(client.post("optim_step", **model.next(), adam_params={}))
    assert "not finite" in failed["error"]
    assert trained(model)[0] < losses[0], "the weights are as they were, and the next step is a good one"


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"eps": 0}, "adam_params.eps = 0: must be 1e-30 or more"),
        ({"eps": 1e-50}, "adam_params.eps = 1e-50: must be 1e-30 or more"),
        ({"learning_rate": 10**400}, "adam_params.learning_rate = 1000"),
        ({"beta2": 1.0}, "adam_params.beta2 = 1.0: must be 0 or more, and below 1"),
    ],
)
def test_steps_that_would_spoil_the_weights_are_refused(params: dict[str, Any], why: str, client: Tinker) -> None:
    """With eps = 0 a new adapter's A, which has no gradient yet, became 0 / 0 with the first step."""
    model = client.model()
    model.run([datum(TOKENS[0][:-1], target_tokens=TOKENS[0][1:], weights=[1.0] * 5)], "cross_entropy")
    failed = client.wait(client.post("optim_step", **model.next(), adam_params=params))
    assert failed["category"] == "user"
    assert why in failed["error"]
    model.step(eps=1e-30)
    assert np.isfinite(trained(model)).all()


def sparse_of(shape: list[int], rows: int) -> Any:
    made = message("Tensor")(dtype=INT64, shape=shape)
    made.sparse_csr.crow_indices = np.zeros(rows + 1, "<i8").tobytes()
    return made


def test_sparse_tensors_are_bounded_before_they_are_dense(client: Tinker) -> None:
    model = client.model()
    for shape, why in (
        ([1, 129], "at most 128 columns"),
        ([1, 2**33], "numbers where sparse tensors are dense; at most 33,554,432"),
        ([-1, 2**33], "numbers where sparse tensors are dense"),
        ([2**20, 128], "numbers where sparse tensors are dense"),
        ([2**20, 4], "1 row pointers"),
    ):
        one = datum([40], target_tokens=sparse_of(shape, 1 if shape[0] == 1 else 0), weights=[1.0])
        assert why in model.run([one], "cross_entropy")["error"], shape
    wide = datum([40], target_tokens=np.zeros((1, 129), np.int64), weights=np.ones((1, 129), np.float32))
    assert "has 129 targets a token; at most 128" in model.run([wide], "cross_entropy")["error"]
    most = datum([40], target_tokens=np.zeros((1, 128), np.int64), weights=np.ones((1, 128), np.float32))
    (found,) = arrays(model.run([most], "cross_entropy").loss_fn_outputs[0], "logprobs")
    assert found.shape == (1, 128)


def test_a_name_in_use_is_refused_unless_overwrite_is_set(client: Tinker) -> None:
    model = client.model()
    path = model.save("save_weights", "same", ttl_seconds=3600)["path"]
    trained(model)
    assert f"there are weights at {path}" in model.save("save_weights", "same")["error"]
    assert model.save("save_weights", "same", overwrite=True)["path"] == path
    assert "ttl_seconds = 0: must be 1 to" in model.save("save_weights", "other", ttl_seconds=0)["error"]


def test_images_are_refused(client: Tinker) -> None:
    made = message("Datum")()
    made.model_input.add().image.SetInParent()
    assert "reads text alone" in client.model().run([made], "cross_entropy")["error"]


def held_back(model: Model, then: Callable[[Any], Any]) -> Any:
    one = datum(TOKENS[1][:-1], target_tokens=TOKENS[1][1:], weights=[1.0] * 4)
    first, second = model.next()["seq_id"], model.next()["seq_id"]
    step = model.client.post("optim_step", **model.next(), adam_params={"learning_rate": 1e-2})
    late = model.send_pass([one], "cross_entropy", second)
    early = model.send_pass([one], "cross_entropy", first)
    return then((early, late, step))


def test_requests_run_in_the_order_of_their_ids(client: Tinker) -> None:
    plain = client.model()
    one = datum(TOKENS[1][:-1], target_tokens=TOKENS[1][1:], weights=[1.0] * 4)
    plain.run([one], "cross_entropy"), plain.run([one], "cross_entropy")
    norm = plain.step()["grad_norm"]
    model = client.model()
    assert held_back(model, lambda promised: client.wait(promised[2]))["metrics"]["grad_norm"] == norm


def test_a_request_counts_once(client: Tinker) -> None:
    plain, model = client.model(), client.model()
    one = datum(TOKENS[1][:-1], target_tokens=TOKENS[1][1:], weights=[1.0] * 4)
    plain.run([one], "cross_entropy")
    seq_id = model.next()["seq_id"]
    promises = [model.send_pass([one], "cross_entropy", seq_id) for _ in range(2)]
    assert promises[0] == promises[1]
    other = message("ForwardBackwardRequest")(model_id=model.model_id, seq_id=seq_id, loss_fn="ppo", data=[one])
    refused = client.http.post("/api/v1/forward_backward", content=other.SerializeToString())
    assert refused.status_code == 400, "a 409 would be sent for five minutes"
    assert "came before, with another body" in refused.json()["error"]
    assert model.step()["grad_norm"] == plain.step()["grad_norm"]
