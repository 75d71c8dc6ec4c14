"""Seats of the cache: what a model with recurrent layers samples where there are few, and that all are given back."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_family

from nmoe.engine.api import Request
from nmoe.engine.native.cache import BLOCK_TOKENS
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.errors import DivergenceError
from nmoe.model.transformer import Transformer

MakeRequest = Callable[..., Request]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_family("qwen3_next").set_numerics("exact")


def tokens(engine: LLMEngine, requests: list[Request]) -> list[list[list[int]]]:
    groups = [engine.add(request) for request in requests]
    while not engine.idle:
        engine.step()
    return [[sample.token_ids for sample in group.samples if sample is not None] for group in groups]


def free_state_slots(engine: LLMEngine) -> tuple[int, int]:
    return engine.scheduler.blocks.available_state_slots, engine.scheduler.blocks.state_slots


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_samples_of_a_prompt_fork_its_state(model: Transformer, request_of: MakeRequest, rows: int) -> None:
    """More samples than rows: the prompt keeps its state until the last has started, and the others run on copies. A prompt of
    whole blocks has no block to copy, and still a state."""
    asked = [request_of("whole", 2 * BLOCK_TOKENS, 5, 12), request_of("part", 21, 4, 9), request_of("one", 3, 1, 30)]
    expected = [tokens(LLMEngine(model, 16), [request])[0] for request in asked]
    assert len({tuple(sample) for sample in expected[0]}) == 5
    engine = LLMEngine(model, rows)
    assert tokens(engine, asked) == expected
    assert free_state_slots(engine) == (rows + 1, rows + 1)
    assert engine.stats().cache_use == 0


def test_state_slots_come_back_from_whatever_ends_early(
    model: Transformer, request_of: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(model, 3, prefill_tokens=16)
    for name in ("running", "waiting"):
        engine.add(request_of(name, 20, 2, 20))
    engine.add_scoring(range(1, 40), 1.0, "scored")
    for _ in range(4):
        engine.step()
    engine.commit(1)  # drops prompts and prefills
    assert free_state_slots(engine)[0] == free_state_slots(engine)[1] - len(engine.running)
    engine.abort("waiting")
    engine.abort_all()
    assert free_state_slots(engine) == (4, 4)
    expected = tokens(engine, [request_of("next", 20, 3, 10)])
    # NaN in a state_slot, from a step that broke off, reaches nobody.
    assert engine.cache.states is not None
    engine.add(request_of("broken", 20, 2, 20))
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(model, "logits", lambda x: torch.full((len(x), 48), torch.nan))
        with pytest.raises(DivergenceError):
            engine.step()
    engine.cache.states.memories.fill_(torch.nan)
    assert free_state_slots(engine) == (4, 4)
    assert tokens(engine, [request_of("next", 20, 3, 10)]) == expected
