"""Samples and log-probabilities over Tinker's protocol: the trainer's numbers, snapshots, and the forms of replies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from served_client import Client, serving
from tinker_client import Model, Tinker, arrays, datum
from transformers import AutoModelForCausalLM

from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.fields import Fields
from nmoe.serve.tinker.messages import LENGTH, STOP
from nmoe.serve.tinker.sampling import read_sample_request
from nmoe.text.tokenizer import Tokenizer

PROMPT = [40, 41, 42, 43, 44, 45, 46]
KEY = "tml-secret"
either = pytest.mark.parametrize("rank", [4, 0], ids=["adapter", "whole"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def server(checkpoint: Path, saved: Path) -> Iterator[Client]:
    # documented: nmoe serve runs/speedrun/base --tinker
    with serving(checkpoint, "--tinker", "--numerics", "exact", "--saved", str(saved), key=KEY) as running:
        running.http.headers["X-API-Key"] = KEY
        yield running


@pytest.fixture
def client(server: Client) -> Tinker:
    return Tinker(server.http)


def trained(model: Model, steps: int = 1) -> None:
    for _ in range(steps):
        one = datum(PROMPT[:-1], target_tokens=PROMPT[1:], weights=[1.0] * 6)
        model.run([one], "cross_entropy")
        model.step()


def scores(client: Tinker, sampler: str, number: int = 0) -> bytes:
    reply = client.sample(sampler, PROMPT, number, max_tokens=1, prompt_logprobs=True)
    return reply.prompt_logprobs


@either
def test_samples_have_the_trainers_bits(rank: int, client: Tinker) -> None:
    model = client.model(rank=rank)
    trained(model)
    sampler = model.sampler()
    reply = client.sample(sampler, PROMPT, max_tokens=5, seed=7, num_samples=3, prompt_logprobs=True)
    assert len(reply.sequences) == 3
    data, given = [], []
    for sequence in reply.sequences:
        tokens = np.frombuffer(sequence.tokens, "<i4")
        whole = [*PROMPT, *tokens]
        data.append(datum(whole[:-1], target_tokens=whole[1:], weights=[0.0] * (len(whole) - 1)))
        given.append(
            np.concatenate([np.frombuffer(part, "<f4") for part in (reply.prompt_logprobs, sequence.logprobs)])
        )
    result = model.run(data, "cross_entropy", forward_only=True)
    for found, sampled in zip(arrays(result.loss_fn_outputs[0], "logprobs"), given, strict=True):
        assert np.isnan(sampled[0])
        np.testing.assert_array_equal(found, sampled[1:])


def base_sampler(client: Tinker) -> str:
    number = next(client.numbers)
    reply = client.post(
        "create_sampling_session", session_id=client.session_id, sampling_session_seq_id=number, base_model="tiny"
    )
    return reply["sampling_session_id"]


def test_hot_samples_have_log_probabilities_of_the_tempered_distribution(client: Tinker, checkpoint: Path) -> None:
    (hot,) = client.sample(base_sampler(client), PROMPT, max_tokens=8, seed=7, temperature=3.0, stop=[]).sequences
    tokens = np.frombuffer(hot.tokens, "<i4").tolist()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / 3).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    np.testing.assert_allclose(np.frombuffer(hot.logprobs, "<f4"), expected, atol=1e-4)


@either
def test_snapshots_stay_and_in_flight_samplers_move(rank: int, client: Tinker) -> None:
    model = client.model(rank=rank)
    trained(model)
    snapshot, moving = model.sampler(), model.sampler("inflight")
    before = scores(client, snapshot)
    assert scores(client, moving) == before
    # More samplers than the engine holds at a time.
    others = []
    for _ in range(6):
        trained(model)
        others.append(scores(client, model.sampler()))
    assert len({before, *others}) == 7
    assert scores(client, snapshot, 1) == before
    assert scores(client, moving, 1) == before, "until the next save in flight"
    model.sampler("inflight")
    assert scores(client, moving, 2) == others[-1]


@either
def test_saved_weights_are_sampled_from(rank: int, client: Tinker) -> None:
    model = client.model(rank=rank)
    trained(model)
    expected = scores(client, model.sampler())
    path = model.save("save_weights_for_sampler", "mine")["path"]
    session = {"session_id": client.session_id, "sampling_session_seq_id": next(client.numbers)}
    sampler = client.post("create_sampling_session", **session, model_path=path)["sampling_session_id"]
    assert client.post("create_sampling_session", **session, model_path=path)["sampling_session_id"] == sampler
    assert scores(client, sampler) == expected
    assert client.http.get(f"/api/v1/samplers/{sampler}").json() == {
        "sampler_id": sampler,
        "base_model": "tiny",
        "model_path": path,
    }
    assert scores(client, base_sampler(client)) != expected


def test_whole_models_are_described_and_saved_as_checkpoints(
    client: Tinker, server: Client, checkpoint: Path, saved: Path
) -> None:
    """One without a `lora_config` is a whole model, too. Base and adapters stay as they are beside it."""
    adapter, base = client.model(), base_sampler(client)
    of_adapter, of_base = scores(client, sampler := adapter.sampler()), scores(client, base)
    number = next(client.numbers)
    asked = {"session_id": client.session_id, "model_seq_id": number, "base_model": "tiny"}
    model = Model(client, client.wait(client.post("create_model", **asked))["model_id"])
    trained(model)
    assert scores(client, sampler, 1) == of_adapter
    assert scores(client, base, 1) == of_base != scores(client, model.sampler())
    info = client.post("get_info", model_id=model.model_id)
    assert (info["is_lora"], info["lora_rank"]) == (False, 0)
    path = model.save("save_weights_for_sampler", "mine")["path"]
    state = model.save("save_weights", "state")["path"]
    listed = client.http.get(f"/api/v1/training_runs/{model.model_id}").json()
    assert (listed["is_lora"], listed["lora_rank"]) == (False, 0)
    about = client.post("weights_info", tinker_path=state)
    assert (about["is_lora"], about["lora_rank"], about["train_unembed"], about["base_model"]) == (
        False,
        0,
        True,
        "tiny",
    )
    directory = saved / model.model_id / "sampler_weights" / "mine"
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        expected = theirs(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(np.frombuffer(scores(client, model.sampler()), "<f4")[1:], expected, atol=1e-4)
    assert Tokenizer.load(directory).encode("abc") == Tokenizer.load(checkpoint).encode("abc")
    loaded = client.post("load_weights", **adapter.next(), path=state, optimizer=False)
    assert "another shape" in client.wait(loaded)["error"]
    assert path.endswith("/mine")


def test_weights_saved_again_under_a_name_are_sampled_from(client: Tinker) -> None:
    """A session that began before keeps the earlier ones."""
    model = client.model()

    def begun(path: str) -> str:
        number = next(client.numbers)
        asked = {"session_id": client.session_id, "sampling_session_seq_id": number, "model_path": path}
        return client.post("create_sampling_session", **asked)["sampling_session_id"]

    trained(model)
    first = begun(path := model.save("save_weights_for_sampler", "latest")["path"])
    before = scores(client, first)
    trained(model, 2)
    assert model.save("save_weights_for_sampler", "latest")["path"] == path
    assert scores(client, begun(path)) == scores(client, model.sampler()) != before
    assert scores(client, first, 1) == before


def test_running_samples_go_on_while_their_sampler_moves(client: Tinker) -> None:
    for _ in range(4):  # on a busy machine a sample may end before the weights come, or begin after them
        same = moved_while_sampling(client)
        if same[0] and not same[-100:].all():
            return
    raise AssertionError(
        f"it began with the weights of before: {same[0]}, it ended with others: {not same[-100:].all()}"
    )


def moved_while_sampling(client: Tinker) -> np.ndarray:
    """Which log-probabilities of a sample are those of the weights that its sampler had when it was asked."""
    model, frozen = client.model(), client.model()
    trained(model), trained(frozen)
    moving = model.sampler("inflight")
    promise = client.post(
        "asample",
        sampling_session_id=moving,
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        sampling_params={"max_tokens": 1200, "stop": []},
    )
    trained(model, 2)
    model.sampler("inflight")
    (moved,) = client.wait(promise, "SampleResponse").sequences
    whole = [*PROMPT, *np.frombuffer(moved.tokens, "<i4")]
    assert len(whole) == 1207
    assert scores(client, moving, 2) == scores(client, model.sampler())
    one = datum(whole[:-1], target_tokens=whole[1:], weights=[0.0] * 1206)
    (before,) = arrays(frozen.run([one], "cross_entropy", forward_only=True).loss_fn_outputs[0], "logprobs")
    same: np.ndarray = np.frombuffer(moved.logprobs, "<f4") == before[6:]
    return same


def test_an_adapter_that_diverged_is_its_clients_alone(client: Tinker) -> None:
    model = client.model()
    model.run([datum(PROMPT[:-1], target_tokens=PROMPT[1:], weights=[1.0] * 6)], "cross_entropy")
    model.step(learning_rate=1e38)
    broken = model.sampler()
    failed = client.sample(broken, PROMPT, max_tokens=2)
    assert "its weights have diverged" in failed["error"]
    health = client.http.get("/api/v1/healthz")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert len(client.sample(base_sampler(client), PROMPT, max_tokens=2, stop=[]).sequences[0].tokens) == 8


def test_a_model_is_unloaded_once_its_requests_are_done(client: Tinker) -> None:
    model = client.model()
    one = datum(PROMPT[:-1], target_tokens=PROMPT[1:], weights=[1.0] * 6)
    seq_id = model.next()["seq_id"]
    later = client.post("optim_step", **model.next(), adam_params={})
    promises = [client.post("unload_model", model_id=model.model_id) for _ in range(2)]
    assert promises[0] == promises[1]
    model.send_pass([one], "cross_entropy", seq_id)
    assert client.wait(later)["metrics"]["grad_norm"] > 0
    gone = [client.wait(promise) for promise in promises]
    assert gone == [{"type": "unload_model", "model_id": model.model_id}] * 2
    assert client.send("optim_step", **model.next(), adam_params={}).status_code == 404
    assert client.post("unload_model", model_id=model.model_id) == promises[0], "it can be asked for again"


def test_likeliest_tokens_of_prompt_and_samples(client: Tinker) -> None:
    sampler = client.model().sampler()
    asked = {"topk_prompt_logprobs": 3, "topk_sample_logprobs": 2, "prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    reply = client.sample(sampler, PROMPT, max_tokens=4, temperature=0.0, **asked)
    top = reply.topk_prompt_logprobs
    ids, found = (
        np.frombuffer(part, kind).reshape(7, 3) for part, kind in ((top.token_ids, "<i4"), (top.logprobs, "<f4"))
    )
    assert (top.k, top.length) == (3, 7)
    assert (ids[:5] == 0).all()
    assert (found[:5] == -99999).all(), "the SDK's mark of no value"
    assert (np.diff(found[5:], axis=1) <= 0).all()
    own = np.frombuffer(reply.prompt_logprobs, "<f4")
    assert np.isnan(own[:5]).all()
    assert np.isfinite(own[5:]).all()
    (sequence,) = reply.sequences
    of_samples = np.frombuffer(sequence.topk_sampled_logprobs.token_ids, "<i4").reshape(-1, 2)
    np.testing.assert_array_equal(of_samples[:, 0], np.frombuffer(sequence.tokens, "<i4"), "greedy takes the likeliest")
    plain = client.sample(sampler, PROMPT, 1, max_tokens=1, prompt_logprobs=True)
    np.testing.assert_array_equal(
        np.frombuffer(plain.prompt_logprobs, "<f4")[5:], own[5:], "the same bits beside these"
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_likeliest_tokens_have_the_sampled_distribution(temperature: float, client: Tinker) -> None:
    """All of the vocabulary's likeliest tokens that there are room for, of which the sampled one is one most times."""
    settings = {"max_tokens": 8, "temperature": temperature, "seed": 3, "topk_sample_logprobs": 128}
    reply = client.sample(client.model().sampler(), PROMPT, num_samples=4, **settings)
    matched = 0
    for sequence in reply.sequences:
        top = sequence.topk_sampled_logprobs
        tokens, own = np.frombuffer(sequence.tokens, "<i4"), np.frombuffer(sequence.logprobs, "<f4")
        ids = np.frombuffer(top.token_ids, "<i4").reshape(len(tokens), 128)
        found = np.frombuffer(top.logprobs, "<f4").reshape(len(tokens), 128)
        assert (np.exp(found).sum(1) < 1 + 1e-5).all()
        rows, columns = np.nonzero(ids == tokens[:, None])
        np.testing.assert_allclose(found[rows, columns], own[rows], atol=1e-5)
        matched += len(rows)
    assert matched >= 4


def test_stops(client: Tinker, tokenizer: Tokenizer) -> None:
    sampler = client.model().sampler()
    (free,) = client.sample(sampler, PROMPT, max_tokens=12, seed=3, stop=[]).sequences
    tokens = np.frombuffer(free.tokens, "<i4")
    assert (len(tokens), free.stop_reason) == (12, LENGTH)
    (by_id,) = client.sample(sampler, PROMPT, 1, max_tokens=12, seed=3, stop=[int(tokens[4])]).sequences
    first = tokens.tolist().index(tokens[4]) + 1
    assert (np.frombuffer(by_id.tokens, "<i4").tolist(), by_id.stop_reason) == (tokens[:first].tolist(), STOP)
    texts = [tokenizer.bytes_of(int(one)) for one in tokens]
    stop = next(text for text in texts[3:] if text.isascii() and text).decode()
    expected = next(n for n in range(1, 13) if stop.encode() in b"".join(texts[:n]))
    (by_text,) = client.sample(sampler, PROMPT, 2, max_tokens=12, seed=3, stop=[stop, "never\n\n"]).sequences
    assert np.frombuffer(by_text.tokens, "<i4").tolist() == tokens[:expected].tolist(), "with the string's last token"
    assert by_text.logprobs == free.logprobs[: 4 * expected]


def test_a_sample_request_counts_once(client: Tinker) -> None:
    sampler = client.model().sampler()
    body = {
        "sampling_session_id": sampler,
        "seq_id": 5,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 3},
    }
    promises = [client.post("asample", **body) for _ in range(2)]
    assert promises[0] == promises[1]
    assert promises[0]["sample_sequence_ids"] == [f"{sampler}:5:0", f"{sampler}:5:1"]
    one, again = (client.wait(promise, "SampleResponse") for promise in promises)
    assert one == again
    assert client.send("asample", **body | {"num_samples": 1}).status_code == 400
    alone = {"base_model": "tiny", **{name: body[name] for name in ("num_samples", "prompt", "sampling_params")}}
    ids = {client.post("asample", **alone)["request_id"] for _ in range(2)}
    assert len(ids) == 2, "without a number each is a request of its own"


def test_a_number_names_one_sampler(client: Tinker) -> None:
    """A second one of its number would sample from the weights of the first."""
    model = client.model()
    model.sampler()
    number = next(client.numbers)
    asked = {"session_id": client.session_id, "sampling_session_seq_id": number}
    assert client.post("create_sampling_session", **asked, base_model="tiny")
    assert client.post("create_sampling_session", **asked, base_model="tiny"), "the same once more"
    path = model.save("save_weights_for_sampler", "named")["path"]
    for other in ({"model_path": path}, {"sampling_session_seq_id": number - 1, "base_model": "tiny"}):
        refused = client.send("create_sampling_session", **asked | other)
        assert refused.status_code == 400
        assert "there is another sampler of this number" in refused.json()["error"]
    failed = client.wait(client.post("save_weights_for_sampler", **model.next(), sampling_session_seq_id=number))
    assert f"sampling_session_seq_id = {number}: there is another sampler" in failed["error"]
    assert model.step(), "the model goes on"


def test_cancelled_samples(client: Tinker) -> None:
    sampler = client.model().sampler()
    promise = client.post(
        "asample",
        sampling_session_id=sampler,
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        sampling_params={"max_tokens": 4000, "stop": []},
    )
    client.post("cancel_future", request_id=promise["request_id"])
    assert "was cancelled" in client.wait(promise)["error"]
    assert client.sample(sampler, PROMPT, 1, max_tokens=1).sequences


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_tokens": 5000}, "exceed the context of 4096"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"temperature": -1.0}, "temperature = -1"),
        ({"stop": [""]}, "sampling_params.stop"),
        ({"prompt_alt_tokens_k": 2}, "does not compute them"),
    ],
)
def test_bad_requests_for_samples(fields: dict[str, object], why: str, client: Tinker) -> None:
    failed = client.sample(client.model().sampler(), PROMPT, **{"max_tokens": 2, **fields})
    assert why in failed["error"]
    assert failed["category"] == "user"


def test_a_stop_of_half_a_character_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    prompt = {"chunks": [{"tokens": PROMPT}]}
    with pytest.raises(TinkerError, match="holds half a character"):
        read_sample_request(Fields({"prompt": prompt, "sampling_params": {"stop": "a\ud800"}}), tokenizer, 100)


@pytest.mark.parametrize("count", [0, 1025, 2**31])
def test_too_many_samples_are_refused_at_once(count: int, client: Tinker) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    asked = {"sampling_session_id": base_sampler(client), "seq_id": 0, "prompt": prompt, "sampling_params": {}}
    refused = client.send("asample", **asked, num_samples=count)
    assert (refused.status_code, refused.json()["error"]) == (400, f"num_samples = {count}: must be 1 to 1024")


def test_a_prompt_of_one_token_has_no_log_probability(client: Tinker) -> None:
    asked = {"topk_prompt_logprobs": 2, "prompt_logprobs": True}
    for number, last in enumerate(({}, {"prompt_logprobs_last_n": 1})):
        reply = client.sample(base_sampler(client), PROMPT[:1], number, max_tokens=1, **asked, **last)
        assert np.isnan(np.frombuffer(reply.prompt_logprobs, "<f4")).tolist() == [True]
        top = reply.topk_prompt_logprobs
        assert (top.k, top.length, np.frombuffer(top.logprobs, "<f4").tolist()) == (2, 1, [-99999, -99999])


def test_sessions_end(client: Tinker) -> None:
    model = client.model()
    sampler = model.sampler()
    path = model.save("save_weights", "kept")["path"]
    client.post(f"sessions/{client.session_id}/finish", reason={"type": "success"}, detail=None)
    assert client.send("session_heartbeat", session_id=client.session_id).status_code == 410
    assert client.send("optim_step", **model.next(), adam_params={}).status_code == 404
    gone = client.send("asample", sampling_session_id=sampler, seq_id=9, prompt={"chunks": []}, sampling_params={})
    assert gone.status_code == 404
    listed = client.http.get(f"/api/v1/training_runs/{model.model_id}/checkpoints").json()["checkpoints"]
    assert [one["tinker_path"] for one in listed] == [path]
    assert client.http.get("/api/v1/checkpoints").json()["cursor"]["total_count"] >= 1
    run = client.http.get(f"/api/v1/training_runs/{model.model_id}").json()
    assert (run["base_model"], run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == ("tiny", 4, path)
    assert client.send("weights_info", tinker_path=path).json()["lora_rank"] == 4
    assert client.http.delete(f"/api/v1/training_runs/{model.model_id}/checkpoints/weights/kept").status_code == 204
    assert client.send("weights_info", tinker_path=path).status_code == 404


def test_keys_versions_and_unknown_things(server: Client, client: Tinker) -> None:
    wrong = httpx2.post(f"{server.http.base_url}/api/v1/create_session", headers={"X-API-Key": "tml-other"}, json={})
    assert wrong.status_code == 401
    assert "send `X-API-Key: KEY`" in wrong.json()["error"]
    old = client.send("create_session", tags=[], user_metadata=None, sdk_version="0.16.1")
    assert old.status_code == 400
    assert "install tinker 0.25 to 0.38" in old.json()["error"]
    assert client.post("client/dynamic_config") == {"sample_cancel_enabled": True}
    large = client.http.post("/api/v1/weights_info", content=b" " * (16 * 2**20 + 1))
    assert (large.status_code, large.json()["error"]) == (413, "the body has more than 16,777,216 bytes")
    assert "newer than 0.38" in client.post("create_session", tags=[], sdk_version="0.51")["warning_message"]
    assert client.send("retrieve_future", request_id="nothing").status_code == 410, "the SDK sends it once more"
    assert client.send("create_model", session_id="none", model_seq_id=0, base_model="tiny").status_code == 404
    other = client.send("create_model", session_id=client.session_id, model_seq_id=90, base_model="gpt-5.4")
    assert (other.status_code, other.json()["category"]) == (404, "user")
    assert "there is tiny" in other.json()["error"]
    part = {"rank": 0, "train_mlp": False}
    asked = {"session_id": client.session_id, "model_seq_id": 91, "base_model": "tiny"}
    assert "train_mlp = false: rank 0" in client.send("create_model", **asked, lora_config=part).json()["error"]
    high = client.post(
        "create_model", session_id=client.session_id, model_seq_id=92, base_model="tiny", lora_config={"rank": 999}
    )
    assert "is more than" in client.wait(high)["error"]
    capabilities = client.http.get("/api/v1/get_server_capabilities").json()["supported_models"]
    assert capabilities == [{"model_name": "tiny", "max_context_length": 4096, "trainable": True, "sampleable": True}]
