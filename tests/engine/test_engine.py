"""The engine in front of the step machine: waiting, streaming, aborting, failing and ending."""

import asyncio
import copy
import gc
import math
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch

from nmoe.engine.api import Delta, Request
from nmoe.engine.native import engine as engine_module
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.errors import DivergenceError, InfrastructureError, UserError
from nmoe.model.ops.cpu.packing import ONEDNN, PackedWeights
from nmoe.model.transformer import Transformer
from nmoe.types import Sample, Sampling

MakeModel = Callable[..., Transformer]
MakeRequest = Callable[..., Request]


@pytest.fixture
def model(tiny_model: MakeModel) -> Transformer:
    return tiny_model()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps long enough that what is asked for while a request runs comes before its end."""
    forward = Transformer.forward

    def slowly(self: Transformer, *args: Any) -> Any:
        time.sleep(0.005)
        return forward(self, *args)

    monkeypatch.setattr(Transformer, "forward", slowly)


def alone(model: Transformer, request: Request) -> list[Sample | None]:
    engine = LLMEngine(model, request.samples)
    group = engine.add(request)
    while not engine.idle:
        engine.step()
    return group.samples


async def all_of(engine: NativeEngine, requests: list[Request]) -> list[list[Sample]]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def many(request_of: MakeRequest) -> list[Request]:
    return [request_of(f"r{i}", 1 + 3 * i % 20, 1 + i % 4, 1 + 7 * i % 30) for i in range(24)]


def record(samples: list[Sample]) -> list[tuple[Any, ...]]:
    return [(s.token_ids, s.logprobs, s.versions, s.finish_reason, s.routes.tolist()) for s in samples]


def test_many_at_once_each_get_their_own_samples_in_order(model: Transformer, request_of: MakeRequest) -> None:
    requests = many(request_of)
    engine = NativeEngine(model, 7)
    for request, samples in zip(requests, engine.run(all_of(engine, requests)), strict=True):
        assert len(samples) == request.samples
        for sample, expected in zip(samples, alone(model, request), strict=True):
            assert expected is not None
            assert sample.token_ids == expected.token_ids
            assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    stats = engine.stats()
    assert stats.generated_tokens == sum(r.samples * r.sampling.max_new_tokens for r in requests)
    assert (stats.running, stats.waiting) == (0, 0)


def test_a_second_run_is_the_same_to_the_bit(model: Transformer, request_of: MakeRequest) -> None:
    requests = many(request_of)
    runs = []
    for _ in range(2):
        engine = NativeEngine(model, 7)
        runs.append((list(map(record, engine.run(all_of(engine, requests)))), engine.stats().decode_steps))
    assert runs[0] == runs[1]


def test_an_engine_that_slept_holds_no_packed_weights_and_samples_the_same(
    model: Transformer, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    clear = PackedWeights.clear
    monkeypatch.setattr(PackedWeights, "clear", lambda self: (freed.append(len(self._packed)), clear(self))[1])
    engine = NativeEngine(model, 40)
    first = engine.run(all_of(engine, many(request_of)))
    engine.forget_prefixes()
    engine.sleep()
    assert freed[-1] > 0 or not ONEDNN
    assert [record(samples) for samples in engine.run(all_of(engine, many(request_of)))] == [record(s) for s in first]

    async def asleep_meanwhile() -> None:
        engine.sleep()

    with pytest.raises(RuntimeError, match="before or after"):
        engine.run(asleep_meanwhile())


def test_a_request_that_can_not_fit_fails_alone(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 4)
    good, bad = request_of("good", 5, 2, 9), request_of("bad", 60, 1, 9)

    async def both() -> list[Any]:
        return await asyncio.gather(engine.generate(bad), engine.generate(good), return_exceptions=True)

    failed, samples = engine.run(both())
    assert isinstance(failed, UserError)
    assert "prompt of 60 tokens + max_new_tokens = 9" in str(failed)
    assert [len(sample.token_ids) for sample in samples] == [9, 9]
    with pytest.raises(UserError, match="prompt of 60 tokens"):
        engine.run(engine.generate(bad))


@pytest.mark.usefixtures("slow")
def test_samples_come_as_each_finishes_and_are_those_of_generate(model: Transformer, request_of: MakeRequest) -> None:
    """With two rows for three samples, the third starts when the first has ended; a stop id makes their lengths differ."""
    engine = NativeEngine(model, 2)
    request = request_of("a", 5, 3, 30, stop_ids=(4, 30))
    expected = engine.run(engine.generate(request))
    assert len({len(sample.token_ids) for sample in expected}) > 1
    generated: list[int] = []  # by the engine, as each sample was heard of

    async def heard_of() -> dict[int, Sample]:
        before, samples = engine.stats().generated_tokens, {}
        async for index, sample in engine.samples(request):
            samples[index] = sample
            generated.append(engine.stats().generated_tokens - before)
        return samples

    samples = engine.run(heard_of())
    assert record([samples[index] for index in range(3)]) == record(expected)
    total = sum(len(sample.token_ids) for sample in expected)
    assert generated[0] < generated[-1] <= total
    assert generated[0] < total


@pytest.mark.usefixtures("slow")
def test_samples_left_early_are_not_sampled_on(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 1)

    async def only_the_first() -> Sample:
        async with aclosing(engine.samples(request_of("a", 5, 4, 12))) as samples:
            async for _, sample in samples:
                return sample
        raise AssertionError("no sample came")

    assert len(engine.run(only_the_first()).token_ids) == 12
    assert engine.stats().generated_tokens < 4 * 12


def test_a_request_for_samples_that_can_not_fit_is_refused(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 1)

    async def gathered(request: Request) -> list[tuple[int, Sample]]:
        return [one async for one in engine.samples(request)]

    with pytest.raises(UserError, match="prompt of 60 tokens"):
        engine.run(gathered(request_of("bad", 60, 2, 9)))


async def heard(engine: NativeEngine, request: Request) -> list[Delta]:
    return [delta async for deltas in engine.stream(request) for delta in deltas]


def test_a_stream_yields_what_generate_returns(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 4)
    request = request_of("a", 5, 1, 12)

    async def beside_another() -> tuple[list[Delta], list[Sample]]:
        return await asyncio.gather(heard(engine, request), engine.generate(request_of("b", 3, 2, 20)))

    deltas, others = engine.run(beside_another())
    (sample,) = engine.run(engine.generate(request))
    assert [delta.token_id for delta in deltas] == sample.token_ids
    assert [delta.logprob for delta in deltas] == pytest.approx(sample.logprobs, abs=1e-5)
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]
    assert deltas[-1].sample is not None
    assert deltas[-1].sample.versions == sample.versions
    assert (deltas[-1].sample.routes == sample.routes).all()
    assert [len(other.token_ids) for other in others] == [20, 20]


def test_a_stream_of_several_samples_is_what_generate_returns(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 2)  # the third sample starts when another has ended
    request = request_of("a", 5, 3, 12)
    deltas, samples = engine.run(heard(engine, request)), engine.run(engine.generate(request))
    for index, sample in enumerate(samples):
        mine = [delta for delta in deltas if delta.index == index]
        assert [delta.token_id for delta in mine] == sample.token_ids
        assert [delta.finish_reason for delta in mine] == [None] * 11 + ["length"]
        assert [delta.sample is None for delta in mine] == [True] * 11 + [False]


def test_one_call_wakes_the_loop_for_all_streams_of_a_step(
    model: Transformer, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = NativeEngine(model, 8), []

    def counting(loop: asyncio.AbstractEventLoop, act: Callable[..., object], *args: object) -> None:
        calls.append(act.__name__)
        loop.call_soon_threadsafe(act, *args)

    monkeypatch.setattr(engine_module, "_call_on", counting)

    async def all_of_them() -> list[list[Delta]]:
        return await asyncio.gather(*(heard(engine, request_of(f"{at}", 5, 1, 12)) for at in range(8)))

    heard_of = engine.run(all_of_them())
    assert [len(deltas) for deltas in heard_of] == [12] * 8
    assert calls.count("_put_all") <= engine.stats().decode_steps
    assert calls.count("resolve") == 8


@pytest.mark.usefixtures("slow")
def test_one_sample_of_a_stream_is_aborted(model: Transformer, request_of: MakeRequest) -> None:
    engine, request = NativeEngine(model, 4), request_of("a", 5, 3, 40)

    async def without_the_second() -> list[Delta]:
        found: list[Delta] = []
        async for deltas in engine.stream(request):
            if not found:
                engine.abort("a", 1)
            found += deltas
        return found

    deltas = engine.run(without_the_second())
    for index, expected in enumerate(alone(model, request)):
        assert expected is not None
        mine = [delta for delta in deltas if delta.index == index]
        tokens = [delta.token_id for delta in mine if delta.token_id is not None]
        assert mine[-1].sample is not None
        assert tokens == mine[-1].sample.token_ids == expected.token_ids[: len(tokens)]
        assert mine[-1].finish_reason == ("abort" if index == 1 else "length")
        assert (len(tokens) < 40) == (index == 1)


def test_no_client_can_name_a_scoring(model: Transformer) -> None:
    """A server's clients choose the ids of requests, and end requests by their ids."""
    engine = NativeEngine(model, 4)
    ids = [1, 2, 3, 4]

    async def both() -> list[Any]:
        named = [Request((5,), 1, Sampling(2), f"score/{number}") for number in range(4)]
        asked = asyncio.gather(engine.likelihoods(ids), *(engine.generate(one) for one in named))
        await asyncio.sleep(0)
        for number in range(4):
            engine.abort(f"score/{number}")
        return await asked

    assert engine.run(both())[0] == engine.run(engine.likelihoods(ids))


def test_likelihoods_have_none_for_the_first_token(model: Transformer) -> None:
    engine, ids = NativeEngine(model, 2), [5, 9, 2, 44, 17]

    async def all_three() -> list[Any]:
        return await asyncio.gather(
            engine.likelihoods(ids),
            engine.likelihoods(ids, top=2, start=3),
            engine.likelihoods(ids[:1]),
            engine.score(ids),
        )

    whole, end, single, scores = engine.run(all_three())
    assert whole[0] is None
    assert [one.logprob for one in whole[1:]] == pytest.approx(scores, abs=1e-6)
    assert {one.top for one in whole[1:]} == {()}
    assert [one.logprob for one in end] == pytest.approx(scores[2:], abs=1e-6)
    assert {len(one.top) for one in end} == {2}
    assert single == [None]
    for wrong, message in (([], "there are no tokens to score"), ([48], "prompt ids must lie in 0..47")):
        with pytest.raises(UserError, match=message):
            engine.run(engine.likelihoods(wrong))


def test_weights_that_diverged_are_named_by_a_stream(model: Transformer, request_of: MakeRequest) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.head_weight.fill_(math.nan)
    engine = NativeEngine(broken, 2)
    for ask in (heard, NativeEngine.generate):
        with pytest.raises(DivergenceError, match="logits are not finite"):
            engine.run(ask(engine, request_of("a", 5, 2, 12)))
    with pytest.raises(DivergenceError, match="log-probabilities are not finite"):
        engine.run(engine.likelihoods([1, 2, 3]))


def test_a_stream_refuses_what_it_can_not_give(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 4)
    with pytest.raises(UserError, match="prompt of 60 tokens"):
        engine.run(heard(engine, request_of("b", 60, 1, 12)))


@pytest.mark.usefixtures("slow")
def test_a_stream_left_early_ends_its_request(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 1)

    async def first_two() -> list[Delta]:
        stream = engine.stream(request_of("a", 5, 1, 50))
        deltas = [*await anext(stream), *await anext(stream)]
        await stream.aclose()
        assert engine.stats().running == 0
        return deltas

    deltas = engine.run(first_two())
    expected = alone(model, request_of("a", 5, 1, 50))[0]
    assert expected is not None
    assert [delta.token_id for delta in deltas] == expected.token_ids[: len(deltas)]
    assert engine.stats().generated_tokens < 50


@pytest.mark.usefixtures("slow")
def test_an_abort_from_outside_gives_the_waiter_what_there_is(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 2)
    gone, stays = request_of("gone", 5, 3, 55, stop_ids=(100, 101)), request_of("stays", 4, 1, 20)

    async def abort_one() -> tuple[list[Sample], list[Sample]]:
        tasks = [asyncio.create_task(engine.generate(request)) for request in (gone, stays)]
        while engine.stats().generated_tokens < 10:
            await asyncio.sleep(0.001)
        engine.abort("gone")
        engine.abort("never heard of")
        return await asyncio.gather(*tasks)

    aborted, whole = engine.run(abort_one())
    assert [sample.finish_reason for sample in aborted] == ["abort"] * 3
    for sample, expected in zip(aborted[:2], alone(model, gone), strict=False):
        assert expected is not None
        assert 5 <= len(sample.token_ids) < 55
        assert sample.token_ids == expected.token_ids[: len(sample.token_ids)]
    assert aborted[2].token_ids == []
    (expected,) = alone(model, stays)
    assert expected is not None
    assert [sample.token_ids for sample in whole] == [expected.token_ids]


@pytest.mark.usefixtures("slow")
def test_an_abort_in_the_same_turn_as_its_request_comes_after_it(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 2)

    async def regret() -> list[Sample]:
        task = asyncio.create_task(engine.generate(request_of("a", 5, 1, 50)))
        # This runs between the request and the end of its turn, when requests go out together.
        asyncio.get_running_loop().call_soon(engine.abort, "a")
        return await task

    (sample,) = engine.run(regret())
    assert sample.finish_reason == "abort"
    assert len(sample.token_ids) < 50


@pytest.mark.usefixtures("slow")
def test_a_waiter_that_is_cancelled_frees_its_rows(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 2)

    async def impatient() -> list[Sample]:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(request_of("a", 5, 4, 55)), 0.03)
        return await engine.generate(request_of("b", 5, 2, 3))

    assert [len(sample.token_ids) for sample in engine.run(impatient())] == [3, 3]
    assert engine.stats().generated_tokens < 2 * 55


def test_the_event_loop_lives_while_a_step_is_under_way(
    model: Transformer, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, begun, released = Transformer.forward, threading.Event(), threading.Event()

    def held(self: Transformer, *args: Any) -> Any:
        begun.set()
        assert released.wait(10), "the event loop waited for the step"
        return forward(self, *args)

    monkeypatch.setattr(Transformer, "forward", held)
    engine = NativeEngine(model, 2)

    async def release() -> list[Sample]:
        task = asyncio.create_task(engine.generate(request_of("a", 5, 1, 4)))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        released.set()
        return await task

    assert len(engine.run(release())[0].token_ids) == 4


class BrokenModelError(Exception):
    pass


def break_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    forward, seen = Transformer.forward, []

    def breaks(self: Transformer, *args: Any) -> Any:
        seen.append(1)
        if len(seen) > calls:
            raise BrokenModelError("no more")
        return forward(self, *args)

    monkeypatch.setattr(Transformer, "forward", breaks)


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_an_error_of_the_model_reaches_every_waiter(
    model: Transformer,
    request_of: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    calls: int,
) -> None:
    engine = NativeEngine(model, 3)
    fates: list[type] = []

    async def wait(request: Request) -> None:
        try:
            await engine.generate(request)
        except BaseException as error:
            fates.append(type(error))
            raise

    async def everyone() -> None:
        single = [request for request in many(request_of) if request.samples == 1][:3]
        streamed = [replace(request, request_id=f"{request.request_id}, streamed") for request in single]
        await asyncio.gather(*map(wait, many(request_of)), *(heard(engine, request) for request in streamed))

    with monkeypatch.context() as patch:
        break_after(patch, calls)
        with pytest.raises(BrokenModelError, match="no more"):
            engine.run(everyone())
    assert set(fates) <= {BrokenModelError, asyncio.CancelledError}
    assert len(fates) >= len(many(request_of)) - 2  # but those that finished in the first steps
    # Nothing is left that asyncio prints when it is collected: that traceback, printed within another's, ended pytest itself.
    gc.collect()
    assert [record for record in caplog.records if "never retrieved" in record.getMessage()] == []
    # It starts anew, with nothing left over.
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    request = request_of("a", 5, 2, 12)
    for sample, expected in zip(engine.run(engine.generate(request)), alone(model, request), strict=True):
        assert expected is not None
        assert sample.token_ids == expected.token_ids


def test_the_next_run_after_weights_that_are_not_finite(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 2)
    expected = engine.run(engine.generate(request_of("a", 4, 3, 12)))
    weight = model.blocks[0].attention.qkv_proj.weight[-1]
    saved = weight.detach().clone()

    async def both() -> None:
        await asyncio.gather(engine.generate(request_of("a", 4, 3, 12)), engine.score(range(9)))

    with torch.no_grad():
        weight.fill_(torch.nan)
    try:
        for _ in range(2):
            with pytest.raises(DivergenceError, match="its weights have diverged"):
                engine.run(both())
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    assert engine.stats().running == engine.stats().waiting == engine.stats().cache_use == 0
    again = engine.run(engine.generate(request_of("a", 4, 3, 12)))
    assert [sample.token_ids for sample in again] == [sample.token_ids for sample in expected]


def test_an_error_of_the_model_ends_a_stream(
    model: Transformer, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(model, 3)
    # A stream that is cancelled still waits for its request to end, which no step will ever tell it.
    break_after(monkeypatch, 3)
    with pytest.raises(BrokenModelError, match="no more"):
        engine.run(heard(engine, request_of("a", 5, 1, 30)))


def test_what_is_asked_for_while_ending_does_not_wait_for_ever(
    model: Transformer, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(model, 3)
    answers: list[str] = []

    async def stubborn() -> None:
        try:
            await engine.generate(request_of("a", 5, 1, 4))
        finally:
            for late in (engine.generate(request_of("b", 5, 1, 4)), engine.update_weights(model, 1)):
                try:
                    await late
                except RuntimeError as error:
                    answers.append(str(error))

    break_after(monkeypatch, 0)
    with pytest.raises(BrokenModelError):
        engine.run(stubborn())
    assert answers == ["the engine stopped after an error"] * 2


@pytest.mark.usefixtures("slow")
def test_an_error_of_the_coroutine_ends_what_still_runs(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 3)
    cancelled = []

    async def wait() -> None:
        try:
            await engine.generate(request_of("a", 5, 2, 50))
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def fail() -> None:
        while not engine.stats().generated_tokens:
            await asyncio.sleep(0.001)
        raise ZeroDivisionError("a grader's")

    async def both() -> None:
        await asyncio.gather(wait(), fail())

    with pytest.raises(ZeroDivisionError, match="a grader's"):
        engine.run(both())
    assert cancelled == [1]
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert engine.stats().generated_tokens < 100


def test_requests_left_behind_do_not_disturb_the_result(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 3)

    async def leave(seconds: float) -> str:
        tasks = [asyncio.create_task(engine.generate(request_of(f"{i}", 5, 1, 1 + i))) for i in range(8)]
        await asyncio.sleep(seconds)
        del tasks
        return "left"

    for attempt in range(40):  # ends at every moment of a step, that of a request's last token among them
        assert engine.run(leave(attempt * 2e-4)) == "left"
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_one_coroutine_at_a_time(model: Transformer) -> None:
    engine = NativeEngine(model, 3)

    async def nested() -> None:
        engine.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="already running a coroutine"):
        engine.run(nested())
    assert engine.run(asyncio.sleep(0, "again")) == "again"


def test_nothing_is_awaited_that_no_run_would_answer(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 3)
    for never in (engine.generate(request_of("a", 5, 1, 3)), engine.update_weights(model, 1)):
        with pytest.raises(RuntimeError, match=r"outside engine\.run"):
            asyncio.run(never)


def test_weights_come_from_the_learners_module_alone(
    model: Transformer, tiny_model: MakeModel, request_of: MakeRequest
) -> None:
    engine = NativeEngine(model, 3)
    with pytest.raises(ValueError, match="takes weights from no other"):
        engine.run(engine.update_weights(tiny_model(), 1))
    engine.run(engine.update_weights(model, 6))
    (sample,) = engine.run(engine.generate(request_of("a", 5, 1, 3)))
    assert sample.versions == [6, 6, 6]


@pytest.mark.usefixtures("slow")
def test_running_requests_go_on_with_the_new_version(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 3)

    async def update_midway() -> Sample:
        task = asyncio.create_task(engine.generate(request_of("a", 5, 1, 40)))
        while engine.stats().generated_tokens < 4:
            await asyncio.sleep(0.001)
        await engine.update_weights(model, 2)
        return (await task)[0]

    versions = engine.run(update_midway()).versions
    assert versions == [0] * versions.count(0) + [2] * versions.count(2)
    assert versions.count(0) >= 4
    assert versions.count(2) >= 1


def test_an_action_between_steps_gives_back_what_it_returns_or_raises(model: Transformer) -> None:
    engine = NativeEngine(model, 3)

    def fails() -> None:
        raise UserError("not like this")

    async def act() -> int:
        with pytest.raises(UserError, match="not like this"):
            await engine.between_steps(fails)
        await engine.between_steps(engine.forget_prefixes)
        return await engine.between_steps(threading.get_ident)

    assert engine.run(act()) == threading.get_ident(), "it ran on the thread that steps"


@pytest.mark.usefixtures("slow")
def test_a_paused_engine_takes_no_step_and_goes_on_as_if_nothing_was(
    model: Transformer, request_of: MakeRequest
) -> None:
    engine = NativeEngine(model, 3)

    async def pause_midway() -> tuple[list[Sample], list[Sample], list[Sample]]:
        task = asyncio.create_task(engine.generate(request_of("a", 5, 1, 40)))
        dropped = asyncio.create_task(engine.generate(request_of("dropped", 5, 1, 40)))
        while engine.stats().generated_tokens < 4:
            await asyncio.sleep(0.001)
        await engine.pause()
        steps = engine.stats().decode_steps
        late = asyncio.create_task(engine.generate(request_of("late", 4, 1, 3)))
        await asyncio.sleep(0.05)
        engine.abort("dropped")
        aborted = await dropped
        assert engine.stats().decode_steps == steps
        assert not late.done()
        await engine.resume()
        return await task, await late, aborted

    kept, late, aborted = engine.run(pause_midway())
    assert [record(kept), record(late)] == [
        record(engine.run(engine.generate(request_of(*asked)))) for asked in (("a", 5, 1, 40), ("late", 4, 1, 3))
    ]
    assert aborted[0].finish_reason == "abort"
    assert 4 <= len(aborted[0].token_ids) + 2 < 40


def test_an_engine_paused_at_the_end_of_a_run_steps_in_the_next(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 3)
    engine.run(engine.pause())
    (sample,) = engine.run(engine.generate(request_of("a", 5, 1, 3)))
    assert len(sample.token_ids) == 3


def test_scores_come_beside_samples(tiny_model: MakeModel, request_of: MakeRequest) -> None:
    model = tiny_model()
    engine = NativeEngine(model, 3)

    async def ask() -> tuple[list[Sample], list[float]]:
        samples = await engine.generate(request_of("a", 5, 1, 9))
        ids = [*request_of("a", 5, 1, 9).prompt_ids, *samples[0].token_ids]
        scores, _ = await asyncio.gather(engine.score(ids), engine.generate(request_of("b", 5, 2, 9)))
        with pytest.raises(UserError, match="two tokens"):
            await engine.score([1])
        return samples, scores

    samples, scores = engine.run(ask())
    assert len(scores) == 5 + 9 - 1
    assert scores[4:] == pytest.approx(samples[0].logprobs, abs=1e-5)
    assert engine.run(engine.score([1, 2, 3], temperature=2.0)) != engine.run(engine.score([1, 2, 3]))


def test_an_interrupt_while_the_loop_starts_ends_the_coroutine_there(
    model: Transformer, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine, cancelled, began, request = (
        NativeEngine(model, 2),
        list[bool](),
        threading.Event(),
        request_of("a", 3, 1, 20),
    )

    async def listen() -> None:
        began.set()
        try:
            await heard(engine, request)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        began.wait(10)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.run(listen())
    gc.collect()
    assert cancelled == [True]
    assert capfd.readouterr().err == ""
    assert len(engine.run(heard(engine, request))) == 20


def test_versions_that_come_fast_let_a_request_end(model: Transformer, request_of: MakeRequest) -> None:
    """Each version has 30 tokens or more computed again, 8 in a step; a token is sampled before the next one."""
    engine, versions = NativeEngine(model, 4), 0
    engine._engine.scheduler.prefill_tokens = 8

    async def replaced() -> list[Sample]:
        nonlocal versions
        answer = asyncio.ensure_future(engine.generate(request_of("old", 30, 1, 12)))
        while not answer.done():
            versions += 1
            await engine.replace_weights(lambda: None, versions)
        return await answer

    found = 0
    for _ in range(5):  # the event loop of a busy machine may get few turns while it samples
        before = versions
        ((sample,)) = engine.run(asyncio.wait_for(replaced(), 30))
        assert sample.versions == sorted(sample.versions)
        assert versions - before <= 2 + len(sample.token_ids)
        found = max(found, len(set(sample.versions)))
    assert found >= 3


def test_a_copy_that_broke_off_lets_nothing_be_sampled_until_weights_have_come(
    model: Transformer, request_of: MakeRequest
) -> None:
    """Also not for a request that comes while the copy is under way."""
    engine, copying = NativeEngine(model, 4), threading.Event()

    def broken() -> None:
        copying.set()
        while not engine._inbox:
            time.sleep(0.001)
        raise ValueError("half of it")

    async def meanwhile() -> list[Sample]:
        await asyncio.to_thread(copying.wait)
        return await engine.generate(request_of("meanwhile", 5, 1, 3))

    async def sampled() -> tuple[list[Any], Sample]:
        first = await asyncio.gather(engine.replace_weights(broken, 1), meanwhile(), return_exceptions=True)
        later = engine.generate(request_of("later", 5, 1, 3)), engine.score([1, 2, 3])
        found = [*first, *await asyncio.gather(*later, return_exceptions=True)]
        await engine.replace_weights(lambda: None, 2)
        return found, (await engine.generate(request_of("whole", 5, 1, 3)))[0]

    found, whole = engine.run(asyncio.wait_for(sampled(), 30))
    assert [type(one) for one in found] == [ValueError, *[InfrastructureError] * 3]
    assert whole.versions == [2, 2, 2]


def test_an_idle_engine_takes_requests_together_that_come_shortly_after_each_other(
    model: Transformer, request_of: MakeRequest
) -> None:
    async def two(engine: NativeEngine) -> None:
        first = asyncio.create_task(engine.generate(request_of("first", 5, 1, 1)))
        await asyncio.sleep(0.05)
        await asyncio.gather(first, engine.generate(request_of("second", 5, 1, 1)))

    for settles_s, steps in ((0.0, 2), (1.0, 1)):
        engine = NativeEngine(model, 4, settles_s=settles_s)
        engine.run(two(engine))
        assert engine.stats().decode_steps == steps


def test_an_idle_engine_begins_although_requests_go_on_coming(model: Transformer, request_of: MakeRequest) -> None:
    engine = NativeEngine(model, 4, settles_s=0.05)

    async def until_one_is_answered() -> list[asyncio.Task[list[Sample]]]:
        asked: list[asyncio.Task[list[Sample]]] = []
        while not any(task.done() for task in asked):
            asked.append(asyncio.create_task(engine.generate(request_of(str(len(asked)), 5, 1, 1))))
            await asyncio.sleep(0.01)
        await asyncio.gather(*asked)
        return asked

    assert len(engine.run(asyncio.wait_for(until_one_is_answered(), 30))) > 1
