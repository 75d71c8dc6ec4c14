"""A server of Tinker's protocol that is killed and started again: its clients go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from served_client import serving
from tinker_client import Model, Tinker, arrays, datum

IDS = [40, 41, 42, 50, 51, 7, 8]


@contextmanager
def killed(checkpoint: Path, saved: Path, *clients: Tinker) -> Iterator[Any]:
    """Serves clients that were there before, and ends by a kill."""
    with serving(checkpoint, "--tinker", "--numerics", "exact", "--saved", str(saved), ends=False) as server:
        for client in clients:
            client.http = server.http
        yield server.http
        server.process.kill()


def one(k: int) -> Any:
    ids = [(token + k) % 200 for token in IDS]
    return datum(ids[:-1], target_tokens=ids[1:], weights=[1.0, 0.5, -0.25, 1.0, 1.0, 2.0])


def passed(model: Model, k: int) -> list[float]:
    result = model.run([one(k), one(k + 1)], "cross_entropy")
    return [result.metrics["loss:sum"], *np.concatenate(arrays(result.loss_fn_outputs[0], "logprobs"))]


def scores(client: Tinker, sampler: str, number: int) -> bytes:
    found: bytes = client.sample(sampler, IDS, number, max_tokens=3, seed=5, prompt_logprobs=True).SerializeToString()
    return found


def test_all_goes_on_as_if_nothing_had_happened(checkpoint: Path, tmp_path: Path) -> None:
    """Two models train alike, one of them on a server that is killed after each of its steps, and in the middle of a batch."""
    with killed(checkpoint, tmp_path) as http:
        plain_client, client = Tinker(http), Tinker(http)
        plain, model = plain_client.model(), client.model()
        expected = []
        for k in range(4):
            expected.append([passed(plain, k), passed(plain, k + 10), plain.step(weight_decay=0.1)])
        expected_scores = scores(plain_client, plain.sampler(), 0)
        found = [[passed(model, 0), passed(model, 10), model.step(weight_decay=0.1)]]
        flying, snapshot = model.sampler("inflight"), model.sampler()
        of_first = scores(client, snapshot, 0)
        model.save("save_weights", "state")
        assert scores(client, flying, 0) == of_first
        # Acknowledged, and nothing else.
        early = model.send_pass([one(1), one(2)], "cross_entropy", seq := model.next()["seq_id"])
    with killed(checkpoint, tmp_path, client, plain_client):
        assert model.send_pass([one(1), one(2)], "cross_entropy", seq) == early, "the same request comes again"
        result = client.wait(early, "ForwardBackwardOutput")
        first = [result.metrics["loss:sum"], *np.concatenate(arrays(result.loss_fn_outputs[0], "logprobs"))]
        second = passed(model, 11)
    with killed(checkpoint, tmp_path, client, plain_client):
        # Both passes run again, whose results are there.
        again = client.wait(early, "ForwardBackwardOutput")
        assert again == result
        found.append([first, second, model.step(weight_decay=0.1)])
        found.append([passed(model, 2), passed(model, 12), model.step(weight_decay=0.1)])
        assert scores(client, snapshot, 1) == of_first, "a snapshot stays"
        assert scores(client, flying, 1) == of_first, "its next save moves it"
        assert model.sampler("inflight") != flying
        moved = scores(client, flying, 2)
        assert moved != of_first
        assert "there are weights at" in model.save("save_weights", "state")["error"]
        unloaded = client.model()
        client.wait(client.post("unload_model", model_id=unloaded.model_id))
    with killed(checkpoint, tmp_path, client, plain_client):
        found.append([passed(model, 3), passed(model, 13), model.step(weight_decay=0.1)])
        assert found == expected
        assert scores(client, flying, 3) == moved
        assert scores(client, model.sampler(), 0) == expected_scores
        assert plain.step() is not None, "the other session goes on, too"
        gone = client.send("optim_step", model_id=unloaded.model_id, seq_id=1, adam_params={})
        assert gone.status_code == 404
        client.post(f"sessions/{client.session_id}/finish", reason={"type": "success"})
    left = [file.name for file in (tmp_path / ".state").iterdir() if file.name.startswith(("model-", "values-"))]
    with killed(checkpoint, tmp_path, client, plain_client):
        assert plain_client.post("session_heartbeat", session_id=plain_client.session_id)
        assert client.send("session_heartbeat", session_id=client.session_id).status_code == 404
        now = [file.name for file in (tmp_path / ".state").iterdir() if file.name.startswith(("model-", "values-"))]
        assert set(now) <= set(left)
        assert sum(name.startswith("model-") for name in now) == 1
        assert sum(name.startswith("values-") for name in now) == 1
