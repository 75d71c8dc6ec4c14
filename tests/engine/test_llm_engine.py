"""The synchronous engine, driven by hand: every number against a plain forward pass, and which sequence runs when."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmoe.engine.api import Delta, RawLogprob, Request
from nmoe.engine.native import runner
from nmoe.engine.native.cache import bytes_per_block
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.engine.native.sampler import kept_mask, uniforms
from nmoe.engine.native.scheduler import GATHER_STEPS
from nmoe.errors import DivergenceError, UserError
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.types import Sample, Sampling

MakeModel = Callable[..., Transformer]
MakeRequest = Callable[..., Request]
FullForward = Callable[..., tuple[Tensor, Tensor | None]]

MODELS: dict[str, dict[str, Any]] = {
    "moe": {},
    "dense": {"experts": 0, "tie_embeddings": True},
    "sigmoid": {"router_scores": "sigmoid", "qk_norm": False, "kv_heads": 4},
}


def samples_of(model: Transformer, rows: int, *requests: Request) -> list[list[Sample]]:
    engine = LLMEngine(model, rows)
    groups = [engine.add(request) for request in requests]
    finished = run(engine)
    assert sorted(map(id, finished)) == sorted(map(id, groups))
    return [whole(group.samples) for group in groups]


def run(engine: LLMEngine) -> list:
    finished = []
    while not engine.idle:
        finished += engine.step()
    return finished


def whole(samples: list[Sample | None]) -> list[Sample]:
    assert None not in samples
    return [sample for sample in samples if sample is not None]


def ragged(request_of: MakeRequest, **sampling: Any) -> list[Request]:
    """More samples than rows, prompts from one token to forty, limits from one token to the context's end."""
    shapes = [("a", 5, 3, 20), ("b", 1, 2, 30), ("c", 17, 5, 9), ("d", 40, 1, 24), ("e", 2, 2, 1), ("f", 9, 3, 13)]
    return [request_of(*shape, **sampling) for shape in shapes]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_routes_are_those_of_a_full_forward(
    tiny_model: MakeModel, request_of: MakeRequest, full_forward: FullForward, kind: str, temperature: float
) -> None:
    model = tiny_model(**MODELS[kind])
    requests = ragged(request_of, temperature=temperature)
    differences = []
    for request, samples in zip(requests, samples_of(model, 4, *requests), strict=True):
        draws = uniforms(request.sampling.seed, request.samples, request.sampling.max_new_tokens)
        assert len(samples) == request.samples
        for index, sample in enumerate(samples):
            count = request.sampling.max_new_tokens
            assert len(sample.token_ids) == len(sample.logprobs) == len(sample.versions) == count
            assert sample.finish_reason == "length"
            logits, routes = full_forward(model, request.prompt_ids, sample.token_ids)
            logprobs = (logits.double() / temperature).log_softmax(-1)
            tokens = torch.tensor(sample.token_ids)
            differences.append(torch.tensor(sample.logprobs) - logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
            # Each token is the one that its own draw falls on.
            mass = logprobs.exp().cumsum(-1)
            for at, token in enumerate(sample.token_ids):
                assert (mass[at, token - 1] if token else 0) - 1e-5 <= draws[index, at] <= mass[at, token] + 1e-5
            if routes is None:
                assert sample.routes is None
            else:
                assert torch.equal(torch.from_numpy(sample.routes), routes)
            assert sample.kept_ids is None
    difference = torch.cat(differences).abs()
    assert difference.mean() <= 1e-6 / min(1.0, temperature)
    assert difference.max() <= 1e-4


def test_a_request_gives_the_same_tokens_in_any_company(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    requests = ragged(request_of)
    alone = {r.request_id: samples_of(model, r.samples, r)[0] for r in requests}
    assert len({tuple(sample.token_ids[:8]) for sample in alone["a"]}) == 3  # samples of a prompt are not copies
    for rows, order in ((1, requests), (4, requests), (7, requests[::-1]), (64, requests[2:] + requests[:2])):
        for request, samples in zip(order, samples_of(model, rows, *order), strict=True):
            for sample, expected in zip(samples, alone[request.request_id], strict=True):
                assert sample.token_ids == expected.token_ids
                assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
                assert (sample.routes == expected.routes).all()


def test_more_samples_or_tokens_asked_for_change_none(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    ((few,),) = samples_of(model, 4, request_of("a", 5, 1, 4))
    many = samples_of(model, 4, request_of("a", 5, 6, 30))[0]
    assert many[0].token_ids[:4] == few.token_ids


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 100])
def test_a_finished_sequence_frees_its_place_at_once(tiny_model: MakeModel, request_of: MakeRequest, rows: int) -> None:
    model = tiny_model()
    shapes = [("a", 3, 2, 9), ("b", 4, 1, 2), ("c", 2, 3, 5), ("d", 6, 1, 30), ("e", 3, 4, 1), ("f", 8, 2, 12)]
    engine = LLMEngine(model, rows)
    for shape in shapes:
        engine.add(request_of(*shape))
    # A sample samples its first token when it is admitted and another in the same step: it holds a row for its tokens less
    # one. In order of arrival, each takes the row that is free first.
    free_at = [0] * rows
    for _, _, n, tokens in shapes:
        for _ in range(n):
            free_at.sort()
            free_at[0] += max(1, tokens - 1)
    while not engine.idle:
        engine.step()
        stats = engine.stats()
        assert stats.running <= rows
    assert stats.decode_steps == max(free_at)
    assert stats.generated_tokens == sum(n * tokens for _, _, n, tokens in shapes)
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.busy_s > 0


def test_stats_count_samples_that_run_and_wait(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = LLMEngine(tiny_model(), 3)
    engine.add(request_of("a", 3, 2, 9))
    engine.add(request_of("b", 3, 4, 9))
    assert (engine.stats().running, engine.stats().waiting) == (0, 6)
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (3, 3)
    assert engine.stats().generated_tokens == 6


@pytest.mark.parametrize(("newcomers", "steps"), [(1, GATHER_STEPS), (3, 0)])
def test_a_few_newcomers_gather_beside_many_running_rows(
    tiny_model: MakeModel, request_of: MakeRequest, newcomers: int, steps: int
) -> None:
    """One beside 40 waits for others, three do not: 3 * 16 > 40. Either way they get the tokens that they get alone."""
    engine = LLMEngine(tiny_model(), 64)
    engine.add(request_of("many", 3, 40, 30))
    engine.step()
    late = [engine.add(request_of(f"late{place}", 4, 1, 5)) for place in range(newcomers)]
    waited = 0
    while engine.stats().running == 40:
        engine.step()
        waited += engine.stats().running == 40
    assert waited == steps
    run(engine)
    alone = samples_of(tiny_model(), 4, *(group.request for group in late))
    assert [[s.token_ids for s in whole(group.samples)] for group in late] == [
        [s.token_ids for s in one] for one in alone
    ]


def test_a_prompt_is_prefilled_once_for_all_its_samples(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = LLMEngine(tiny_model(), 3)
    engine.add(request_of("a", 11, 8, 4))
    engine.add(request_of("b", 7, 1, 4))
    run(engine)
    assert engine.stats().prefilled_tokens == 11 + 7


def test_long_prompts_take_several_steps_and_the_others_decode_meanwhile(
    tiny_model: MakeModel, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(tiny_model(), 4, prefill_tokens=20)
    calls = []
    forward = Transformer.forward

    def counting(self, token_ids_T: Tensor, *rest: Any) -> Tensor:
        calls.append(len(token_ids_T))
        return forward(self, token_ids_T, *rest)

    monkeypatch.setattr(Transformer, "forward", counting)
    engine.add(request_of("short", 5, 1, 8))
    engine.add(request_of("long", 50, 1, 4))
    engine.step()
    assert calls == [20, 1]  # 5 + 15 of 50, then the short one's second token
    engine.step()
    engine.step()
    assert calls[2:] == [20, 1, 15, 2]
    assert engine.stats().prefilled_tokens == 55


def fill(engine: LLMEngine) -> None:
    """Steps until a sequence had to give way."""
    while engine.stats().preemptions == 0:
        engine.step()


def small(model: Transformer, blocks: int, rows: int = 8) -> LLMEngine:
    return LLMEngine(model, rows, cache_bytes=blocks * bytes_per_block(model.config, torch.float32))


def test_the_youngest_gives_way_and_comes_back(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    asked = [request_of(name, 10, 1, 50) for name in ("old", "mid", "new")]
    (expected,) = zip(*samples_of(model, 3, *asked), strict=True)
    engine = small(model, 7)  # each wants four blocks in the end
    groups = [engine.add(request) for request in asked]
    fill(engine)
    assert [sequence.group.request.request_id for sequence in engine.running.sequences] == ["old", "mid"]
    assert engine.stats().waiting == 1
    finished = run(engine)
    assert [group.request.request_id for group in finished] == ["old", "mid", "new"]
    for group, sample in zip(groups, expected, strict=True):
        assert group.samples[0] is not None
        assert group.samples[0].token_ids == sample.token_ids
        assert group.samples[0].logprobs == pytest.approx(sample.logprobs, abs=1e-5)
        assert (group.samples[0].routes == sample.routes).all()


def test_a_sequence_that_gave_way_can_be_aborted(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = small(tiny_model(), 7)
    groups = [engine.add(request_of(name, 10, 1, 50)) for name in ("old", "mid", "new")]
    fill(engine)
    assert engine.abort("new") == [groups[2]]
    sample = groups[2].samples[0]
    assert sample is not None
    assert sample.finish_reason == "abort"
    assert 0 < len(sample.token_ids) == len(sample.logprobs) == len(sample.versions) < 50
    assert sample.routes.shape[0] == 10 + len(sample.token_ids) - 1
    run(engine)
    assert engine.stats().cache_use == 0


def test_a_sequence_that_gave_way_keeps_its_tokens_versions(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = small(tiny_model(), 7)
    groups = [engine.add(request_of(name, 10, 1, 50)) for name in ("old", "mid", "new")]
    fill(engine)
    engine.commit(5)
    run(engine)
    versions = groups[2].samples[0].versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 5}


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_new_weights_compute_all_keys_of_running_sequences_if_asked_to(
    tiny_model: MakeModel, request_of: MakeRequest, kind: str, recompute: bool
) -> None:
    """Tokens after an update then are as a plain forward pass of the new weights along the recorded routes predicts them."""
    model = tiny_model(**MODELS[kind])
    engine = LLMEngine(model, 4)
    group = engine.add(request_of("running", 9, 2, 30))
    for _ in range(12):
        engine.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    engine.commit(5, recompute)
    run(engine)
    for sample in whole(group.samples):
        assert sample.versions == [0] * 13 + [5] * 17
        ids = torch.tensor([*group.request.prompt_ids, *sample.token_ids])
        trace = RouterTrace(replay=None if sample.routes is None else torch.from_numpy(sample.routes))
        with torch.no_grad():
            states = model(ids[:-1], torch.arange(len(ids) - 1), PackedAttention([len(ids) - 1], ids.device), trace)
            logprobs = model.logits(states).log_softmax(-1).gather(-1, ids[1:, None])[-17:, 0]
        away = (torch.tensor(sample.logprobs[13:]) - logprobs).abs().max()
        assert away < 1e-5 if recompute else away > 1e-3
    assert engine.stats().cache_use == 0


def test_many_samples_of_one_prompt_fit_where_they_share_it(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model(experts=0)
    engine = small(model, 9, rows=6)  # 32 positions shared, and a block of their own each: 8 in all
    group = engine.add(request_of("many", 32, 6, 14))
    run(engine)
    assert engine.stats().preemptions == 0
    expected = samples_of(model, 6, group.request)[0]
    assert [s.token_ids for s in whole(group.samples)] == [s.token_ids for s in expected]


def test_a_prefix_is_found_until_the_weights_change(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = LLMEngine(tiny_model(), 4)
    for hits, prefilled in ((0, 40), (32, 8)):
        before = engine.stats()
        engine.add(request_of("again", 40, 2, 3))
        run(engine)
        assert engine.stats().prefix_hit_tokens - before.prefix_hit_tokens == hits
        assert engine.stats().prefilled_tokens - before.prefilled_tokens == prefilled
    engine.commit(1)
    engine.add(request_of("again", 40, 2, 3))
    run(engine)
    assert engine.stats().prefix_hit_tokens == 32


def test_a_next_turn_finds_the_one_before(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    engine = LLMEngine(model, 4)
    first = engine.add(request_of("turn", 20, 1, 15))
    run(engine)
    sample = whole(first.samples)[0]
    ids = (*first.request.prompt_ids, *sample.token_ids, 3, 1)
    second = Request(ids, 1, Sampling(10, seed=4), "turn/2")
    group = engine.add(second)
    run(engine)
    assert engine.stats().prefix_hit_tokens == 32  # of the 34 that were fed
    assert whole(group.samples)[0].token_ids == samples_of(model, 1, second)[0][0].token_ids


@pytest.mark.parametrize("updated", [False, True])
def test_a_next_turn_never_finds_what_a_sequence_that_gave_way_computed_with_routes_of_older_weights(
    tiny_model: MakeModel, request_of: MakeRequest, updated: bool
) -> None:
    """After an update a sequence that gave way is prefilled by the new weights along its recorded routes, so its keys are not those
    of a new prompt with the same tokens."""
    model = tiny_model()
    engine = small(model, 7)
    groups = [engine.add(request_of(name, 10, 1, 50)) for name in ("old", "mid", "new")]
    fill(engine)
    (sequence,) = engine.scheduler.preempted
    ids = (*sequence.group.request.prompt_ids, *sequence.token_ids)
    assert len(ids) == 33, "two whole blocks, and the token to go on from"
    if updated:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "router" in name:
                    weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        engine.commit(5)
    run(engine)
    assert all(group.samples[0] is not None for group in groups)
    again = Request(ids, 1, Sampling(4, seed=4), "again")
    before = engine.stats().prefix_hit_tokens
    group = engine.add(again)
    run(engine)
    assert (engine.stats().prefix_hit_tokens - before > 0) is not updated
    (found,), ((expected,),) = whole(group.samples), samples_of(model, 1, again)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_what_is_longer_than_the_cache_is_refused_and_stalls_nobody(
    tiny_model: MakeModel, request_of: MakeRequest
) -> None:
    engine = small(tiny_model(), 2)
    with pytest.raises(
        UserError, match=r"prompt of 20 tokens \+ max_new_tokens = 14 exceeds the cache of 32 tokens; raise"
    ):
        engine.add(request_of("long", 20, 1, 14))
    with pytest.raises(UserError, match="exceeds the cache of 32"):  # the prompt's last block beside a sample's copy
        engine.add(request_of("two", 20, 2, 13))
    engine.add(request_of("fits", 20, 1, 13))
    engine.add(request_of("fits too", 1, 2, 16))
    assert len(run(engine)) == 2
    with pytest.raises(UserError, match="holds not even one block"):
        LLMEngine(tiny_model(), 1, cache_bytes=10)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, r"top_p = 0.0 must lie in \(0, 1\]"),
        ({"temperature": 1e-38, "top_p": 0.5}, r"temperature = 1e-38 must be 0 \(greedy\) or lie in 1e-06\.\.1e\+06"),
        ({"temperature": 1e39}, r"temperature = 1e\+39 must be"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_k": 2**63}, "top_k = 9223372036854775808 must be 0"),
        ({"stop_ids": (3, 2**63)}, "stop_ids has 9223372036854775808"),
        ({"stop_ids": (-1, 3)}, "stop_ids has -1"),
    ],
)
def test_impossible_sampling_is_refused(
    tiny_model: MakeModel, request_of: MakeRequest, sampling: dict[str, Any], message: str
) -> None:
    engine = LLMEngine(tiny_model(), 2)
    other = engine.add(request_of("yes", 3, 1, 3))
    engine.step()
    with pytest.raises(UserError, match=message):
        engine.add(request_of("no", 3, 1, 3, **sampling))
    run(engine)
    assert len(whole(other.samples)[0].token_ids) == 3


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1e-6, "top_p": 0.5}, {"temperature": 1e6}, {"top_k": 2**63 - 1, "stop_ids": (2**63 - 1,)}],
)
def test_sampling_at_the_edge_of_what_is_allowed(
    tiny_model: MakeModel, request_of: MakeRequest, sampling: dict[str, Any]
) -> None:
    ((sample,),) = samples_of(tiny_model(), 1, request_of("edge", 3, 1, 6, **sampling))
    assert len(sample.logprobs) == 6
    assert all(-10 < logprob <= 0 for logprob in sample.logprobs)


def test_two_requests_of_one_id_at_once_are_refused(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = LLMEngine(tiny_model(), 2)
    again = "request a: another request of this id is running"
    for _ in range(2):  # an id is free again once its request has ended
        first = engine.add(request_of("a", 3, 1, 3))
        for second in (lambda: engine.add(request_of("a", 5, 1, 3)), lambda: engine.add_scoring([1, 2], 1.0, "a")):
            with pytest.raises(UserError, match=again):
                second()
        run(engine)
        assert len(whole(first.samples)[0].token_ids) == 3
    engine.add(request_of("a", 3, 1, 3))
    engine.step()
    engine.abort("a")
    scored = engine.add_scoring([1, 2, 3], 1.0, "a")
    run(engine)
    assert scored.scores is not None
    engine.add(request_of("a", 3, 1, 3))


def test_scoring_beside_sampling_and_its_bad_input(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    engine = LLMEngine(model, 1, prefill_tokens=7)
    sampled = engine.add(request_of("s", 6, 2, 9))
    scored = engine.add_scoring(range(20), 0.7, "score")
    run(engine)
    assert len(whole(sampled.samples)) == 2
    ids = torch.arange(20)
    with torch.no_grad():
        states = model(ids, ids, PackedAttention([20], ids.device), RouterTrace())
        logprobs = (model.logits(states) / 0.7).log_softmax(-1)
    assert scored.scores == pytest.approx(logprobs[:-1].gather(1, ids[1:, None]).flatten().tolist(), abs=1e-5)
    for token_ids, temperature, message in (
        ([1], 1.0, "two tokens"),
        ([1, 2], 0.0, "above 0"),
        ([1, 99], 1.0, "0..47"),
    ):
        with pytest.raises(UserError, match=message):
            engine.add_scoring(token_ids, temperature, "no")
    with pytest.raises(UserError, match="exceeds the model's context"):
        engine.add_scoring([1] * 65, 1.0, "no")
    aborted = engine.add_scoring(range(20), 1.0, "stop")
    engine.step()
    assert engine.abort("stop") == [aborted]
    assert engine.idle
    assert engine.stats().cache_use == 0


@contextmanager
def diverged(parameter: Tensor) -> Iterator[None]:
    """One NaN in a weight."""
    with torch.no_grad():
        saved = parameter.view(-1)[0].clone()
        parameter.view(-1)[0] = float("nan")
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.view(-1)[0] = saved


@pytest.mark.parametrize("kernels", [True, False])
def test_after_weights_that_are_not_finite_the_engine_works_again(
    tiny_model: MakeModel, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """Requests that were being prefilled, decoded, waiting or paused when the weights diverged are gone, and neither they nor
    their NaN in the cache touch those that come after."""
    if not kernels:
        monkeypatch.setattr(runner, "kernels_in_use", nullcontext)
    model = tiny_model()
    requests = [request_of("a", 5, 3, 20, top_k=5), request_of("b", 33, 2, 20), request_of("c", 21, 4, 9)]
    expected = samples_of(model, 3, *requests)
    engine = LLMEngine(model, 3, prefill_tokens=12)
    value_rows = model.blocks[0].attention.qkv_proj.weight[-1:]  # NaN reaches the cache
    for steps in (0, 1, 2, 5):
        groups = [engine.add(request) for request in requests]
        for _ in range(steps):
            engine.step()
        with diverged(value_rows), pytest.raises(DivergenceError, match="are not finite: its weights have diverged"):
            run(engine)
        assert all(group.aborted for group in groups)
        assert engine.idle
        assert (engine.stats().running, engine.stats().waiting, engine.stats().cache_use) == (0, 0, 0)
        assert engine.cache.attention.keys.isfinite().all()
        assert engine.cache.attention.values.isfinite().all()
        engine.abort_all()
    engine.add_scoring(range(20), 1.0, "score")
    with diverged(value_rows), pytest.raises(DivergenceError, match="are not finite"):
        run(engine)
    groups = [engine.add(request) for request in requests]
    run(engine)
    for group, samples in zip(groups, expected, strict=True):
        for sample, other in zip(whole(group.samples), samples, strict=True):
            assert sample.token_ids == other.token_ids
            assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert sample.kept_ids == other.kept_ids


def test_divergence_is_seen_where_only_the_head_shows_it(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    engine = LLMEngine(model, 1)
    for temperature in (0.0, 1.0):
        engine.add(request_of("nan", 3, 1, 3, temperature=temperature))
        with diverged(model.head.weight), pytest.raises(DivergenceError, match="logits are not finite"):
            run(engine)
    engine.add_scoring([1, 2, 3], 1.0, "nan")
    with diverged(model.head.weight), pytest.raises(DivergenceError, match="log-probabilities are not finite"):
        run(engine)
    assert engine.idle


def test_an_interrupted_step_leaves_an_empty_engine(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    (expected,) = samples_of(model, 2, request_of("a", 5, 2, 9))

    def interrupt(deltas: list[Delta]) -> None:
        raise KeyboardInterrupt

    engine = LLMEngine(model, 2)
    engine.add(request_of("a", 5, 2, 9), on_deltas=interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.idle
    group = engine.add(request_of("a", 5, 2, 9))
    run(engine)
    assert [sample.token_ids for sample in whole(group.samples)] == [sample.token_ids for sample in expected]


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.integers(5, 12),
    rows=st.integers(1, 6),
    prefill=st.integers(1, 40),
    shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3), st.integers(1, 30)), min_size=1, max_size=6),
    commit=st.integers(0, 40),
)
def test_everything_ends_and_gives_back_its_blocks(
    tiny_model: MakeModel, request_of: MakeRequest, blocks: int, rows: int, prefill: int, shapes: list, commit: int
) -> None:
    model = tiny_model()
    cache = blocks * bytes_per_block(model.config, torch.float32)
    engine = LLMEngine(model, rows, cache_bytes=cache, prefill_tokens=prefill)
    groups = [engine.add(request_of(f"{i}", *shape)) for i, shape in enumerate(shapes)]
    for step in range(3000):
        if engine.idle:
            break
        if step == commit:
            engine.commit(1)
        engine.step()
    assert engine.idle
    assert engine.stats().cache_use == 0
    for group in groups:
        for sample in whole(group.samples):
            assert len(sample.token_ids) == group.request.sampling.max_new_tokens == len(sample.logprobs)
            assert sample.versions == sorted(sample.versions)


def cut_at(sample: Sample, stop_ids: tuple[int, ...]) -> tuple[list[int], str]:
    for at, token in enumerate(sample.token_ids):
        if token in stop_ids:
            return sample.token_ids[: at + 1], "stop"
    return sample.token_ids, "length"


def test_a_sample_ends_with_the_stop_token_it_met(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    shapes = [("a", 5, 4, 20), ("b", 3, 4, 25), ("c", 9, 4, 15), ("d", 1, 4, 20)]
    free = samples_of(model, 16, *(request_of(*shape) for shape in shapes))
    # Each request stops at tokens that some of its samples are known to meet, each at another number of them.
    stops: list[tuple[int, ...]] = [
        (),
        (free[1][0].token_ids[4],),
        (free[2][0].token_ids[0], free[2][1].token_ids[7], free[2][2].token_ids[14]),
        (free[3][0].token_ids[19], 0),
    ]
    requests = [request_of(*shape, stop_ids=stop) for shape, stop in zip(shapes, stops, strict=True)]
    reasons = set()
    for order in itertools.permutations(range(4)):
        results = samples_of(model, 3, *(requests[i] for i in order))
        for i, samples in zip(order, results, strict=True):
            for sample, unstopped in zip(samples, free[i], strict=True):
                assert (sample.token_ids, sample.finish_reason) == cut_at(unstopped, stops[i])
                assert len(sample.logprobs) == len(sample.versions) == len(sample.token_ids)
                assert sample.routes.shape[0] == len(requests[i].prompt_ids) + len(sample.token_ids) - 1
                reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_stop_token_at_the_limit_is_a_stop(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    ((free,),) = samples_of(model, 1, request_of("a", 5, 1, 3))
    last = next(i for i, token in enumerate(free.token_ids) if token not in free.token_ids[:i])
    request = request_of("a", 5, 1, last + 1, stop_ids=(free.token_ids[last],))
    ((sample,),) = samples_of(model, 1, request)
    assert (sample.token_ids, sample.finish_reason) == (free.token_ids[: last + 1], "stop")


def test_an_abort_keeps_what_there_is_and_frees_the_rows(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    # Ids that are never sampled: two, since the columns of stop ids then grow while a step is under way.
    never = {"stop_ids": (100, 101)}
    requests = [
        request_of("first", 3, 1, 12, **never),
        request_of("gone", 6, 5, 20, **never),
        request_of("last", 4, 2, 9),
    ]
    expected = [samples_of(model, 8, request)[0] for request in requests]
    engine = LLMEngine(model, 5)
    groups = [engine.add(request) for request in requests]
    engine.step()
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (5, 3)
    assert engine.abort("gone") == [groups[1]]
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    samples = whole(groups[1].samples)
    assert [sample.finish_reason for sample in samples] == ["abort"] * 5
    assert [len(sample.token_ids) for sample in samples] == [3, 3, 3, 3, 0]
    for sample, full in zip(samples[:4], expected[1][:4], strict=True):
        assert sample.token_ids == full.token_ids[:3]
        assert sample.logprobs == pytest.approx(full.logprobs[:3], abs=1e-5)
        assert (sample.routes == full.routes[:8]).all()
    engine.step()
    assert engine.stats().running == 3
    run(engine)
    for group, full in ((groups[0], expected[0]), (groups[2], expected[2])):
        assert [sample.token_ids for sample in whole(group.samples)] == [sample.token_ids for sample in full]
        assert {sample.finish_reason for sample in whole(group.samples)} == {"length"}


def test_an_abort_moves_the_rows_behind_it_up(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    requests = [request_of(name, 3 + i, 1, 10, stop_ids=(90, 91)) for i, name in enumerate("abcd")]
    expected = [samples_of(model, 1, request)[0][0] for request in requests]
    for gone in "abcd":
        engine = LLMEngine(model, 4)
        groups = {request.request_id: engine.add(request) for request in requests}
        engine.step()
        engine.abort(gone)
        run(engine)
        for request, full in zip(requests, expected, strict=True):
            (sample,) = whole(groups[request.request_id].samples)
            assert sample.token_ids == full.token_ids[: 2 if request.request_id == gone else 10]
            assert sample.logprobs == pytest.approx(full.logprobs[: len(sample.logprobs)], abs=1e-5)


def test_an_abort_of_what_waits_or_is_not_there(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = LLMEngine(tiny_model(), 1)
    waiting = engine.add(request_of("a", 3, 2, 5))
    assert engine.abort("b") == []
    assert engine.abort("a") == [waiting]
    assert [(s.token_ids, s.finish_reason) for s in whole(waiting.samples)] == [([], "abort")] * 2
    assert engine.idle
    engine.add(request_of("c", 3, 2, 5))
    engine.add(request_of("d", 3, 2, 5))
    engine.step()
    engine.abort_all()
    assert engine.idle


@pytest.mark.parametrize(
    ("prompt", "n", "max_new_tokens", "message"),
    [
        (
            tuple(range(40)),
            1,
            25,
            r"request r: prompt of 40 tokens \+ max_new_tokens = 25 exceeds .* context of 64 tokens",
        ),
        ((), 1, 5, "request r: the prompt has no tokens"),
        ((1,), 0, 5, "request r: samples = 0: must be at least 1"),
        ((1,), 1, -1, "request r: max_new_tokens = -1: must be at least 1"),
        ((1, 48), 1, 5, r"request r: prompt ids must lie in 0\.\.47"),
        ((-1, 4), 1, 5, r"prompt ids must lie in 0\.\.47"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(
    tiny_model: MakeModel, request_of: MakeRequest, prompt: tuple[int, ...], n: int, max_new_tokens: int, message: str
) -> None:
    engine = LLMEngine(tiny_model(), 2)
    with pytest.raises(UserError, match=message):
        engine.add(Request(prompt, n, request_of("x", 1, 1, max_new_tokens).sampling, "r"))
    assert engine.idle


def test_a_request_may_fill_the_context_to_its_end(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    ((sample,),) = samples_of(tiny_model(), 1, request_of("a", 40, 1, 24))
    assert len(sample.token_ids) == 24


def test_every_token_carries_the_version_it_was_sampled_with(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = LLMEngine(tiny_model(), 2)
    group = engine.add(request_of("a", 3, 3, 6))
    engine.step()
    engine.commit(4)
    engine.step()
    engine.commit(9)
    run(engine)
    assert [sample.versions for sample in whole(group.samples)] == [[0, 0, 4, 9, 9, 9]] * 2 + [[9] * 6]


def test_samples_that_start_after_a_commit_start_from_the_new_weights(
    tiny_model: MakeModel, request_of: MakeRequest, full_forward: FullForward
) -> None:
    model, request = tiny_model(), request_of("a", 7, 2, 5)
    engine = LLMEngine(model, 1)
    group = engine.add(request)
    engine.step()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.mul_(1.2)
    engine.commit(1)
    run(engine)
    sample = whole(group.samples)[1]
    assert sample.versions == [1] * 5
    logits, _ = full_forward(model, request.prompt_ids, sample.token_ids)
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids).unsqueeze(-1)).squeeze(-1)
    assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.8}, {"top_k": 5}, {"top_p": 0.7, "top_k": 10, "temperature": 0.7}], ids=str
)
def test_kept_sets_are_recorded_where_sampling_truncates(
    tiny_model: MakeModel, request_of: MakeRequest, full_forward: FullForward, sampling: dict[str, Any]
) -> None:
    model = tiny_model()
    cutting, whole_support = request_of("a", 5, 3, 12, **sampling), request_of("b", 3, 3, 12)
    of_cutting, of_whole = samples_of(model, 4, whole_support, cutting)[::-1]
    assert [sample.kept_ids for sample in of_whole] == [None] * 3
    assert [s.token_ids for s in of_whole] == [s.token_ids for s in samples_of(model, 4, whole_support)[0]]
    temperature = sampling.get("temperature", 1.0)
    for sample in of_cutting:
        assert sample.kept_ids is not None
        assert len(sample.kept_ids) == len(sample.token_ids)
        logits, _ = full_forward(model, cutting.prompt_ids, sample.token_ids)
        logits /= temperature
        rows = len(sample.token_ids)
        top_p, top_k = torch.full((rows,), sampling.get("top_p", 1.0)), torch.full((rows,), sampling.get("top_k", 0))
        masks = kept_mask(logits, top_p, top_k)
        for mask, row, kept, token, logprob in zip(
            masks, logits, sample.kept_ids, sample.token_ids, sample.logprobs, strict=True
        ):
            assert kept == mask.nonzero().flatten().tolist()
            assert token in kept
            assert logprob == pytest.approx(float(row[token] - row[kept].logsumexp(0)), abs=1e-4)
    assert min(len(kept) for sample in of_cutting for kept in sample.kept_ids or []) < 48


def test_greedy_takes_the_likeliest_token_every_time(
    tiny_model: MakeModel, request_of: MakeRequest, full_forward: FullForward
) -> None:
    model, request = tiny_model(), request_of("a", 5, 2, 15, temperature=0.0)
    samples = samples_of(model, 3, request, request_of("b", 4, 3, 15))[0]
    for sample in samples:
        logits, _ = full_forward(model, request.prompt_ids, sample.token_ids)
        assert sample.token_ids == logits.argmax(-1).tolist()
        assert sample.logprobs == [0.0] * 15


def test_tokens_are_streamed_as_they_are_sampled(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    engine = LLMEngine(model, 3)
    heard: list[Delta] = []
    group = engine.add(request_of("a", 5, 3, 7), heard.extend)
    engine.add(request_of("b", 5, 3, 7))
    engine.step()
    assert [delta.index for delta in heard] == [0, 1, 2, 0, 1, 2]
    run(engine)
    for index, sample in enumerate(whole(group.samples)):
        mine = [delta for delta in heard if delta.index == index]
        assert [delta.token_id for delta in mine] == sample.token_ids
        assert [delta.logprob for delta in mine] == sample.logprobs
        assert [delta.finish_reason for delta in mine] == [None] * 6 + ["length"]
        assert [delta.sample for delta in mine] == [None] * 6 + [sample]
        assert {delta.raw for delta in mine} == {None}


EXTRAS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"presence_penalty": 2.0, "frequency_penalty": 0.25, "temperature": 0.7},
    {"logit_bias": ((3, 100.0), (4, 99.0)), "top_k": 5},
    {"min_p": 0.9},
    {"min_p": 0.5, "top_p": 0.9, "presence_penalty": -1.0},
]


def adjusted(logits: Tensor, token_ids: list[int], asked: Sampling) -> Tensor:
    """The tempered logits that a completion was drawn from, one row for each of its tokens, computed token by token."""
    logits = logits.double().clone()
    for row in range(len(token_ids)):
        for token in range(logits.shape[1]):
            count = token_ids[:row].count(token)
            logits[row, token] -= asked.frequency_penalty * count + asked.presence_penalty * (count > 0)
        for token, value in asked.logit_bias:
            logits[row, token] += value
    return logits / (asked.temperature or 1.0)


def test_penalties_bias_and_min_p_in_a_mixed_batch(
    tiny_model: MakeModel, request_of: MakeRequest, full_forward: FullForward
) -> None:
    """Rows of every kind together, over a cache so small that some are preempted, against a plain forward pass."""
    model = tiny_model()
    engine = LLMEngine(model, 5, 9 * bytes_per_block(model.config, torch.float32))
    deltas: dict[str, list[Delta]] = {}
    groups = []
    for at, extra in enumerate(EXTRAS):
        request = replace(request_of(f"r{at}", 5 + at, 2, 24, **extra), top_logprobs=at)
        groups.append(engine.add(request, deltas.setdefault(request.request_id, []).extend))
    run(engine)
    assert engine.stats().preemptions > 0
    for group in groups:
        asked = group.request.sampling
        for index, sample in enumerate(whole(group.samples)):
            logits, _ = full_forward(model, group.request.prompt_ids, sample.token_ids)
            tempered = adjusted(logits, sample.token_ids, asked)
            probabilities = tempered.softmax(-1)
            cutting = bool(asked.min_p or asked.top_k or asked.top_p < 1)
            assert (sample.kept_ids is not None) == cutting
            if cutting:
                kept = [sorted(ids) for ids in sample.kept_ids or []]
                naive = kept_mask(tempered.float(), torch.full((24,), asked.top_p), torch.full((24,), asked.top_k)) & (
                    probabilities >= asked.min_p * probabilities.amax(-1, keepdim=True)
                )
                assert kept == [row.nonzero().flatten().tolist() for row in naive]
                tempered = tempered.masked_fill(~naive, float("-inf"))
            tokens = torch.tensor(sample.token_ids)
            if asked.temperature == 0:
                assert sample.token_ids == tempered.argmax(-1).tolist()
                assert sample.logprobs == [0.0] * 24
            else:
                draws = uniforms(asked.seed, 2, 24)[index]
                mass = tempered.softmax(-1).cumsum(-1)
                for row, token in enumerate(sample.token_ids):
                    assert (mass[row, token - 1] if token else 0) - 1e-5 <= draws[row] <= mass[row, token] + 1e-5
                expected = tempered.log_softmax(-1).gather(1, tokens[:, None]).flatten()
                assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
            raw = torch.log_softmax(logits, -1)
            mine = [delta for delta in deltas[group.request.request_id] if delta.index == index]
            assert [delta.token_id for delta in mine] == sample.token_ids
            for row, delta in enumerate(mine):
                assert delta.raw is not None
                assert delta.raw.logprob == pytest.approx(raw[row, delta.token_id].item(), abs=1e-5)
                most = raw[row].topk(group.request.top_logprobs)
                assert [value for _, value in delta.raw.top] == pytest.approx(most.values.tolist(), abs=1e-5)
                assert [token for token, _ in delta.raw.top] == most.indices.tolist()


def test_a_request_without_extras_gets_the_same_bits_beside_one_that_has_them(
    tiny_model: MakeModel, request_of: MakeRequest
) -> None:
    model = tiny_model().set_numerics("exact")
    plain = request_of("plain", 5, 3, 20)
    ((alone),) = samples_of(model, 8, plain)
    engine = LLMEngine(model, 8)
    group = engine.add(plain)
    for at, extra in enumerate(EXTRAS):
        engine.add(replace(request_of(f"r{at}", 5, 1, 20, **extra), top_logprobs=3), lambda deltas: None)
    run(engine)
    for mine, expected in zip(whole(group.samples), alone, strict=True):
        assert (mine.token_ids, mine.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.mark.parametrize("extra", EXTRAS[1:], ids=str)
def test_sixty_four_requests_at_once_are_those_one_by_one(
    tiny_model: MakeModel, request_of: MakeRequest, extra: dict[str, Any]
) -> None:
    """Exact numerics: equal bits, raw log-probabilities included."""
    model = tiny_model().set_numerics("exact")
    requests = [replace(request_of(f"{at}", 3 + at % 7, 1, 6, **extra), top_logprobs=2) for at in range(64)]

    def streamed(engine: LLMEngine, asked: list[Request]) -> dict[str, list[Delta]]:
        deltas: dict[str, list[Delta]] = {request.request_id: [] for request in asked}
        for request in asked:
            engine.add(request, deltas[request.request_id].extend)
        run(engine)
        return deltas

    together, engine = streamed(LLMEngine(model, 64), requests), LLMEngine(model, 64)
    for request in requests:
        engine.forget_prefixes()
        found, expected = together[request.request_id], streamed(engine, [request])[request.request_id]
        assert [(d.token_id, d.logprob, d.raw) for d in found] == [(d.token_id, d.logprob, d.raw) for d in expected]


@pytest.mark.parametrize("start", [0, 1, 2, 13, 29])
@pytest.mark.parametrize("prefill", [7, 8192])
def test_likelihoods_are_those_of_a_full_forward(
    tiny_model: MakeModel, full_forward: FullForward, monkeypatch: pytest.MonkeyPatch, start: int, prefill: int
) -> None:
    monkeypatch.setattr(runner, "_PIECE_LOGITS", 48 * 4)  # pieces of four rows
    model = tiny_model()
    ids = torch.randint(48, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    engine = LLMEngine(model, 2, prefill_tokens=prefill)
    group = engine.add_likelihoods(ids, 3, start, "likelihoods")
    run(engine)
    logits, _ = full_forward(model, tuple(ids[:1]), ids[1:])
    expected = logits.log_softmax(-1)[max(1, start) - 1 :]
    assert group.scores is not None
    assert len(group.scores) == len(expected) == 30 - max(1, start)
    for row, (score, token) in enumerate(zip(group.scores, ids[max(1, start) :], strict=True)):
        assert isinstance(score, RawLogprob)
        assert score.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        most = expected[row].topk(3)
        assert [token for token, _ in score.top] == most.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(most.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "ready", "running", "preempted"])
def test_one_sample_of_several_is_aborted(tiny_model: MakeModel, request_of: MakeRequest, state: str) -> None:
    model = tiny_model()
    request = request_of("a", 20, 4, 30)
    (expected,) = samples_of(model, 8, request)
    engine = LLMEngine(model, 2 if state == "ready" else 8, prefill_tokens=5 if state == "prefilling" else 8192)
    deltas: list[Delta] = []
    group = engine.add(request, deltas.extend)
    gone = 3 if state == "ready" else 0
    if state != "waiting":
        engine.step()
    if state == "preempted":
        engine.commit(0, recompute=True)
    status = {"waiting": "WAITING", "ready": "WAITING"}.get(state, state.upper())
    assert group.sequences[gone].status.name == status
    assert engine.abort("a", gone) == []
    assert engine.abort("a", gone) == []  # it has ended
    run(engine)
    samples = whole(group.samples)
    for index, (sample, whole_one) in enumerate(zip(samples, expected, strict=True)):
        mine = [delta for delta in deltas if delta.index == index]
        assert [delta.token_id for delta in mine if delta.token_id is not None] == sample.token_ids
        assert mine[-1].sample is sample
        if index == gone:
            assert (mine[-1].token_id, mine[-1].finish_reason, sample.finish_reason) == (None, "abort", "abort")
            assert sample.token_ids == whole_one.token_ids[: len(sample.token_ids)]
            assert len(sample.token_ids) == (2 if state in ("running", "preempted") else 0)
        else:
            assert sample.token_ids == whole_one.token_ids
    assert engine.idle
    assert engine.stats().cache_use == 0


def test_a_request_whose_samples_are_aborted_one_by_one_ends(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    engine = LLMEngine(tiny_model(), 2)
    group = engine.add(request_of("a", 20, 3, 30))
    engine.step()
    assert [engine.abort("a", index) for index in (2, 0, 1)] == [[], [], [group]]
    assert engine.idle
    assert engine.stats().cache_use == 0
    assert [len(sample.token_ids) for sample in whole(group.samples)] == [2, 2, 0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"min_p": 1.5}, r"min_p = 1.5 must lie in \[0, 1\]"),
        ({"min_p": float("nan")}, "min_p = nan must lie in"),
        ({"presence_penalty": 2.5}, "presence_penalty = 2.5 must lie in -2..2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty = nan must lie in -2..2"),
        ({"logit_bias": ((3, 101.0),)}, r"logit_bias has 101.0; it must lie in -100\.\.100"),
        ({"logit_bias": ((48, 1.0),)}, "logit_bias has token 48; the model's are 0..47"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "names a token twice"),
    ],
)
def test_settings_beyond_their_limits_are_refused(
    tiny_model: MakeModel, request_of: MakeRequest, changed: dict[str, Any], message: str
) -> None:
    engine = LLMEngine(tiny_model(), 2)
    with pytest.raises(UserError, match=message):
        engine.add(request_of("a", 5, 1, 9, **changed))
    with pytest.raises(UserError, match=r"top_logprobs = 49 must lie in 0\.\.48"):
        engine.add(replace(request_of("a", 5, 1, 9), top_logprobs=49))
    assert engine.idle
