"""With exact numerics the engine's log-probabilities are the learner's, bit for bit, whatever the batch."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from nmoe.engine.api import Request, Sample, Sampling
from nmoe.engine.native.engine import NativeEngine
from nmoe.learner.batch import Batch
from nmoe.learner.forward import batch_logprobs
from nmoe.model.numerics import least_rows, linear, with_full_groups
from nmoe.model.transformer import Transformer


async def sample_all(engine: NativeEngine, requests: list[Request]) -> list[list[Sample]]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


@pytest.mark.parametrize("experts", [0, 6])
def test_engine_and_learner_agree_to_the_bit(tiny_model: Callable[..., Transformer], experts: int) -> None:
    model = tiny_model(experts=experts).set_numerics("exact")
    # Ragged prompts and limits: batches shrink to a single row at the end, the smallest products there are.
    requests = [Request(tuple(range(1, 2 + i % 5)), 3, Sampling(3 + 2 * i, seed=i), str(i)) for i in range(6)]
    engine = NativeEngine(model, max_sequences=8)
    answers = engine.run(sample_all(engine, requests))
    pairs = [(request, sample) for request, answer in zip(requests, answers, strict=True) for sample in answer]
    sequences = [list(request.prompt_ids) + sample.token_ids for request, sample in pairs]
    starts = [len(request.prompt_ids) - 1 for request, _ in pairs]
    scored = torch.cat([torch.arange(len(s) - 1) >= start for s, start in zip(sequences, starts, strict=True)])
    batch = Batch(
        lengths=tuple(len(s) - 1 for s in sequences),
        inputs_T=torch.tensor([token for s in sequences for token in s[:-1]]),
        targets_T=torch.tensor([token for s in sequences for token in s[1:]]),
        scored_T=scored,
        weights_T=scored.float(),
    )
    recomputed = batch_logprobs(model, batch, 10_000, 1.0)
    emitted = torch.tensor([logprob for _, sample in pairs for logprob in sample.logprobs])
    assert torch.equal(recomputed, emitted)
    assert emitted.std() > 0.1


def test_rows_do_not_depend_on_their_number() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 96, generator=generator), torch.randn(160, 96, generator=generator)
    whole = linear(x, weight, exact=True)
    for rows in (1, 2, 5, 7, 8, 9, 31):
        assert torch.equal(linear(x[:rows], weight, exact=True), whole[:rows])
    torch.testing.assert_close(whole, x @ weight.T)


def test_groups_are_padded_and_cut_back() -> None:
    seen = []

    def experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        seen.append(counts.tolist())
        return torch.cat([part * (10**e) for e, part in enumerate(rows.split(counts.tolist()))])

    rows = torch.arange(1.0, 5.0).unsqueeze(-1)
    expert_of_row = torch.tensor([0, 0, 2, 2])
    out = with_full_groups(experts, rows, expert_of_row, torch.tensor([2, 0, 2]))
    assert out.flatten().tolist() == [1.0, 2.0, 300.0, 400.0]
    assert seen == [[least_rows()] * 3]
