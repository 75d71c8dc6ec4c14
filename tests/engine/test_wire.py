"""Requests and samples as JSON: what is sent arrives, and what is torn or foreign is refused."""

import base64
import io
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.engine.api import Delta, Request
from nmoe.engine.remote.wire import (
    GENERATE,
    UNPUBLISHED,
    WireError,
    decode_deltas,
    decode_samples,
    encode_deltas,
    encode_request,
    encode_samples,
    error_body,
    event,
)
from nmoe.engine.server.requests import decode_request
from nmoe.errors import UserError
from nmoe.types import Sample, Sampling

ids = st.integers(0, 2**31)
logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False).filter(lambda value: value != -9999.0)
samplings = st.builds(
    Sampling,
    max_new_tokens=st.integers(1, 2**40),
    temperature=st.floats(0, 1e6),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**62),
    stop_ids=st.lists(ids, max_size=3).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=3).map(lambda bias: tuple(bias.items())),
)
requests = st.builds(Request, st.lists(ids, min_size=1).map(tuple), st.integers(1, 3), samplings, st.text(max_size=12))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    count = draw(st.integers(0, 6))

    def columns(one: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(one, min_size=count, max_size=count)

    shape = draw(st.integers(0, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = st.binary(min_size=2 * math.prod(shape), max_size=2 * math.prod(shape))
    routes = draw(st.none() | experts.map(lambda raw: np.frombuffer(raw, dtype=np.int16).reshape(shape) & 0x7FFF))
    kept = draw(st.none() | columns(st.lists(ids, max_size=3)))
    versions = draw(columns(st.integers(0, 3)))
    return Sample(
        draw(columns(ids)),
        draw(columns(logprobs)),
        versions,
        draw(st.sampled_from(["stop", "length", "abort"])),
        kept,
        routes,
    )


def same(first: Sample, second: Sample) -> bool:
    """Whether two samples are equal bit for bit, the sign of a zero and the type of the routes included."""
    a, b = (vars(one) | {"logprobs": list(map(float.hex, one.logprobs)), "routes": None} for one in (first, second))
    arrays = first.routes, second.routes
    if any(one is None for one in arrays):
        return a == b and arrays == (None, None)
    return a == b and arrays[0].dtype == arrays[1].dtype and np.array_equal(*arrays)


def sent(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@given(requests, st.booleans())
def test_a_request_arrives_as_it_was(request: Request, stream: bool) -> None:
    assert decode_request(json.loads(sent(encode_request(request, stream)))) == (request, stream)


@settings(max_examples=50)
@given(requests, st.data())
def test_samples_arrive_bit_for_bit(request: Request, data: st.DataObject) -> None:
    sampled = [data.draw(samples()) for _ in range(request.samples)]
    arrived = decode_samples(200, sent(encode_samples(request, sampled)), request)
    assert all(map(same, arrived, sampled))


@given(ids, logprobs, st.sampled_from([None, "stop", "length"]))
def test_a_streamed_token_arrives_as_it_was(token: int, logprob: float, reason: Any) -> None:
    delta = Delta(token, logprob, reason)
    assert decode_deltas(encode_deltas(REQUEST, [delta]).decode(), REQUEST) == [delta]


def test_tokens_of_several_samples_share_an_event() -> None:
    request = Request((5, 6), 3, Sampling(3), "r")
    first = [Delta(7, -0.5, None, 2), Delta(8, -0.25, "stop", 2)]
    second = [Delta(9, -0.125, None, 0), Delta(None, 0.0, "abort", 0)]
    last = [Delta(None, 0.0, "abort", 1)]
    sent_event = encode_deltas(request, [first[0], second[0], first[1], second[1], last[0]]).decode()
    assert json.loads(sent_event.removeprefix("data: "))["choices"][2] == {
        "index": 1,
        "token_ids": [],
        "finish_reason": "abort",
        "logprobs": {"content": []},
    }
    assert decode_deltas(sent_event, request) == [*first, *second, *last]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"index": 3}, "it has the sample 3"),
        ({"index": True}, "it has the sample True"),
        ({"finish_reason": "stop"}, "a sample ends by stop without a token"),
    ],
)
def test_a_choice_that_can_not_be_is_refused(choice: dict[str, Any], message: str) -> None:
    whole = {"index": 0, "token_ids": [], "finish_reason": None, "logprobs": None} | choice
    with pytest.raises(WireError, match=message):
        decode_deltas(json.dumps({"choices": [whole]}), Request((5, 6), 3, Sampling(3), "r"))


def test_rare_settings_are_sent_only_where_they_are_set() -> None:
    common = encode_request(REQUEST)["sampling_params"]
    assert not common.keys() & {"min_p", "presence_penalty", "frequency_penalty", "logit_bias"}
    rare = Sampling(3, min_p=0.1, presence_penalty=0.5, frequency_penalty=-1.0, logit_bias=((7, -100.0), (9, 2.5)))
    request = Request((5, 6), 1, rare, "r")
    params = encode_request(request)["sampling_params"]
    assert params["logit_bias"] == {"7": -100.0, "9": 2.5}
    assert (params["min_p"], params["presence_penalty"], params["frequency_penalty"]) == (0.1, 0.5, -1.0)
    assert decode_request(json.loads(sent(encode_request(request)))) == (request, False)


REQUEST = Request((5, 6), 1, Sampling(3, seed=2**64 - 1, stop_ids=(9,)), "step/1 'a'")
ROUTES = np.array([[[1, 2]], [[0, 5]], [[3, 4]]], dtype=np.int16)
SAMPLE = Sample([7, 9], [-0.5, -1 / 3], [3, 4], "stop", [[7, 8], [9]], ROUTES)


def test_the_form_is_vllms() -> None:
    body = encode_request(REQUEST)
    assert body["sampling_params"]["seed"] == -1  # 64 bits of ones, signed
    assert body["sampling_params"]["max_tokens"] == 3
    assert body["token_ids"] == [5, 6]
    reply = encode_samples(REQUEST, [SAMPLE])
    assert reply["choices"][0]["weight_versions"] == [
        {"version": "3", "start": 0, "end": 1},
        {"version": "4", "start": 1, "end": 2},
    ]
    assert reply["choices"][0]["logprobs"]["content"][1] == {"token": "token_id:9", "logprob": -1 / 3}


def test_a_reply_as_vllm_0_32_writes_it_is_read() -> None:
    array = io.BytesIO()
    np.save(array, ROUTES.astype(np.uint8))
    content = [{"token_id": 7, "logprob": -0.5, "rank": 2, "top_logprobs": []}, {"token_id": 9, "logprob": -0.25}]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": 9,
        "token_ids": [7, 9],
        "routed_experts": base64.b64encode(array.getvalue()).decode(),
        "sampling_mask": None,
        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
        "logprobs": {"content": content},
    }
    reply = {"request_id": f"generate-tokens-{REQUEST.request_id}", "usage": {}, "choices": [choice]}
    (sample,) = decode_samples(200, sent(reply), REQUEST)
    assert same(sample, Sample([7, 9], [-0.5, -0.25], [4, 4], "stop", None, ROUTES))


def test_what_a_real_vllm_answered_is_read_or_refused() -> None:
    recorded = json.loads((Path(__file__).parent / "vllm_wire/exchanges.json").read_text())["exchanges"]
    read = refused = 0
    for one in recorded:
        if one["path"] != GENERATE or "prompt_logprobs" in one["body"]["sampling_params"]:
            continue
        request, reply = decode_request(one["body"], names=("other",))[0], sent(one["reply"])
        if one["status"] == 200:
            for choice, sample in zip(one["reply"]["choices"], decode_samples(200, reply, request), strict=True):
                logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                versions = [int(span["version"]) for span in choice["weight_versions"] or ()]
                assert (sample.token_ids, sample.logprobs) == (choice["token_ids"], logprobs)
                assert (sample.versions[:1], sample.finish_reason) == (versions, choice["finish_reason"])
                read += 1
        else:
            with pytest.raises(WireError) as raised:
                decode_samples(one["status"], reply, request)
            assert raised.value.status == one["status"]
            assert one["reply"]["error"]["message"] in str(raised.value)
            refused += 1
    assert min(read, refused) >= 4


def test_weights_that_nobody_has_published_have_no_version() -> None:
    recorded = json.loads((Path(__file__).parent / "vllm_wire/exchanges.json").read_text())["exchanges"][1]
    request = decode_request(recorded["body"])[0]
    for spans in ([{"version": "default", "start": 0, "end": 3}], None):
        recorded["reply"]["choices"][0]["weight_versions"] = spans
        (sample,) = decode_samples(200, sent(recorded["reply"]), request)
        assert sample.versions == [UNPUBLISHED] * 3 == [-1, -1, -1]


def test_a_sample_that_was_aborted_before_its_first_token_is_read() -> None:
    choice = {"index": 0, "finish_reason": "abort", "token_ids": [], "logprobs": None, "weight_versions": None}
    (sample,) = decode_samples(200, sent({"request_id": REQUEST.request_id, "choices": [choice]}), REQUEST)
    assert sample == Sample([], [], [], "abort")


def changed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    reply = encode_samples(REQUEST, [SAMPLE])
    change(reply, reply["choices"][0])
    return sent(reply)


def npy(array: Any, old: bytes = b"", new: bytes = b"") -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue().replace(old, new) if old else file.getvalue()).decode()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda reply, _: reply.update(request_id="step/2"), "answers request 'step/2'"),
        (lambda reply, _: reply.pop("request_id"), "request_id"),
        (lambda reply, _: reply.update(prompt_token_ids=[5, 7]), "another prompt"),
        (lambda reply, choice: reply.update(choices=[choice, choice]), r"samples \[0, 0\] of 1"),
        (lambda reply, _: reply.update(choices=[]), r"samples \[\] of 1"),
        (lambda _, choice: choice.update(index=1), r"samples \[1\] of 1"),
        (lambda _, choice: choice.update(token_ids=[7]), "1 tokens and 2 log-probabilities"),
        (lambda _, choice: choice.update(token_ids=[7, 8]), "token 8 is named 'token_id:9'"),
        (lambda _, choice: choice.update(token_ids=[7, 9.0]), "token 9.0"),
        (lambda _, choice: choice["logprobs"]["content"][1].update(logprob=-9999.0), "no number"),
        (lambda _, choice: choice["logprobs"]["content"][1].pop("logprob"), "logprob"),
        (lambda _, choice: choice["weight_versions"].pop(), "2 tokens and 1 versions"),
        (lambda _, choice: choice["weight_versions"].pop(0), "versions for the tokens 1 to 2"),
        (lambda _, choice: choice["weight_versions"][1].update(end=10**15), f"versions for the tokens 1 to {10**15}"),
        (lambda _, choice: choice["weight_versions"][1].update(end=1), "versions for the tokens 1 to 1"),
        (lambda _, choice: choice["weight_versions"][0].update(version="newest"), "'newest' is not a whole number"),
        (lambda _, choice: choice.update(finish_reason="error"), "finish reason is 'error'"),
        (lambda _, choice: choice.update(routed_experts="@@"), "its routes are torn: .*base64"),
        (lambda _, choice: choice.update(routed_experts=""), "its routes are torn"),
        (lambda _, choice: choice.update(routed_experts=npy(ROUTES, b"(3, ", b"(3(,")), "its routes are torn"),
        (lambda _, choice: choice.update(routed_experts=npy(ROUTES)[:-8]), "its routes are torn"),
        (lambda _, choice: choice.update(routed_experts=npy(ROUTES + 0.5)), "float64"),
        (lambda _, choice: choice.update(routed_experts=npy(ROUTES.astype(np.int32) + 65536)), "15 bits"),
        (lambda _, choice: choice.update(routed_experts=npy(np.array([{}]))), "its routes are torn"),
    ],
)
def test_a_reply_that_does_not_fit_is_refused(change: Any, fault: str) -> None:
    with pytest.raises(WireError, match=fault) as raised:
        decode_samples(200, changed(change), REQUEST)
    assert raised.value.status == 200


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
values = st.recursive(
    scalars, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=2)
)


def with_one_value_replaced(data: st.DataObject, body: Any) -> Any:
    """A body with any JSON value in one place of it, which is drawn."""
    place, copy = None, json.loads(json.dumps(body))
    inside = copy
    while isinstance(inside, dict | list) and inside and (place is None or data.draw(st.booleans())):
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        place = inside, data.draw(st.sampled_from(keys))
        inside = inside[place[1]]
    assert place is not None, "the body is a table with something in it"
    place[0][place[1]] = data.draw(values)
    return copy


@given(st.data())
def test_no_reply_raises_anything_but_the_one_error(data: st.DataObject) -> None:
    reply = with_one_value_replaced(data, encode_samples(REQUEST, [SAMPLE]))
    with suppress(WireError):
        (sample,) = decode_samples(200, sent(reply), REQUEST)
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.versions)
    with suppress(WireError):
        decode_deltas(event(reply).decode(), REQUEST)


@given(st.data())
def test_no_body_raises_anything_but_the_users_error(data: st.DataObject) -> None:
    with suppress(UserError):
        decode_request(with_one_value_replaced(data, encode_request(REQUEST)))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'{"request_id": 1}', b"\xff", sent({"choices": 1})[:9], b"[" * 10**5]
)
def test_a_torn_reply_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="the reply to request step/1 'a' cannot be used"):
        decode_samples(200, body, REQUEST)


def test_a_refusal_keeps_status_and_message() -> None:
    with pytest.raises(WireError, match="status 409: send all weights first") as raised:
        decode_samples(409, sent(error_body(409, "send all weights first")), REQUEST)
    assert raised.value.status == 409
    with pytest.raises(WireError, match="status 502: <html>"):
        decode_samples(502, b"<html>", REQUEST)


def test_a_stream_ends_and_breaks_off() -> None:
    assert decode_deltas("", REQUEST) == decode_deltas(event(None).decode(), REQUEST) == []
    with pytest.raises(WireError, match="the stream of request step/1 'a' broke off: out of cache"):
        decode_deltas(event(error_body(500, "out of cache")).decode(), REQUEST)
    with pytest.raises(WireError, match="broke off"):
        decode_deltas('data: {"choices": [{"token_ids": [3]', REQUEST)


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        ((), "token_ids", [1, "2"], "must be a list of token ids"),
        ((), "token_ids", [1, True], "must be a list of token ids"),
        ((), "token_ids", None, "token_ids = None: must be list"),
        ((), "request_id", 7, "request_id = 7: must be str"),
        ((), "stream", "yes", "must be bool"),
        ((), "prompt", "Hello", "the body has prompt, which this server does not know"),
        ((), "sampling_params", [], "must be a JSON object"),
        (("sampling_params",), "repetition_penalty", 1.1, "sampling_params has repetition_penalty"),
        (("sampling_params",), "min_p", "0.1", "must be int or float"),
        (("sampling_params",), "logit_bias", {"seven": 1}, "logit_bias has the key 'seven'"),
        (("sampling_params",), "logit_bias", {"9" * 30: 1}, "keys are token ids as text"),
        (("sampling_params",), "logit_bias", {"7": "1"}, "must be int or float"),
        (("sampling_params",), "max_tokens", None, "max_tokens = None: must be int"),
        (("sampling_params",), "max_tokens", 3.0, "must be int"),
        (("sampling_params",), "max_tokens", True, "must be int"),
        (("sampling_params",), "seed", None, "seed = None: must be int"),
        (("sampling_params",), "temperature", 10**400, "is too large"),
        (("sampling_params",), "temperature", "1", "must be int or float"),
        (("sampling_params",), "ignore_eos", False, "ignore_eos = False: this server samples with ignore_eos = True"),
        (("sampling_params",), "logprobs", 5, "logprobs = 5"),
    ],
)
def test_a_request_that_nmoe_would_have_to_guess_is_refused(
    place: tuple[str, ...], name: str, value: Any, message: str
) -> None:
    body: Any = encode_request(REQUEST)
    table = body[place[0]] if place else body
    table[name] = value
    with pytest.raises(UserError, match=message):
        decode_request(body)


def test_a_short_request_has_vllms_defaults() -> None:
    body = {"request_id": "a", "token_ids": [1], "sampling_params": {"max_tokens": 2, "seed": -3, "top_k": -1}}
    assert decode_request(body) == (Request((1,), 1, Sampling(2, seed=2**64 - 3), "a"), False)
