"""What each rank of test_expert_parallel_sampling.py runs: the same requests to whole models, and to one whose experts the ranks
divide."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import Any

import torch
from tiny_models import tiny_family

from nmoe.config.tables.model import OptimizerSection, ParallelSection
from nmoe.engine.api import Request
from nmoe.engine.rank_sampling import RankSampler, RanksEngine, sampling_engine
from nmoe.learner.learner import Learner
from nmoe.model.lora import EXPERTS, Lora, LoraSettings, choose
from nmoe.parallel.gang import Controller, Member, collect, everywhere
from nmoe.parallel.join import join, leave
from nmoe.parallel.ranks import Ranks
from nmoe.types import Sample, Sampling


def make(family: str, adapts: bool) -> Learner:
    model = tiny_family(family, seed=3)
    model.set_numerics("exact")
    lora = None
    if adapts:
        sites = choose(model, (*EXPERTS, "q_proj"))
        lora = Lora(model, LoraSettings(2, 6.0), sites, "base", "f").initialize(1)
        for one in lora.parameters():
            one.data.normal_(std=0.1)
    return Learner(model, OptimizerSection(), 1, 64, lora=lora, ranks=Ranks(ParallelSection(ep=2)))


async def sampled(engine: Any, requests: list[Request]) -> list[list[Sample]]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


async def fails(engine: Any) -> None:
    """A grader that raises while the ranks sample."""
    running = [asyncio.create_task(engine.generate(Request((i, 6), 1, Sampling(40), str(i)))) for i in range(1, 6)]
    await engine.generate(Request((5, 6), 1, Sampling(3), "first"))
    assert not all(one.done() for one in running)
    raise ZeroDivisionError


class Held:
    """What the ranks hold."""

    def __init__(self, sampler: RankSampler) -> None:
        self.sampler = sampler

    def experts(self, share: None) -> list[int]:
        return [sum(one.numel() for one in moe.parameters(recurse=False)) for moe in self.sampler.model.moe_layers()]


def main(case: tuple[str, bool]) -> dict[str, Any]:
    learner = everywhere(make, *case)
    found: dict[str, Any] = {}
    for name in ("whole", "divided"):
        engine = sampling_engine(learner, 8, expert_parallel=name == "divided")
        assert isinstance(engine, RanksEngine)
        engine.run(engine.update_weights(learner.model, 1))
        # One request alone, whose other rank has nothing to compute; then more than run at once; then none.
        for count in (1, 12, 0):
            requests = [
                Request((5, 6, 7 + i % 3), 1 + i % 2, Sampling(4 + i, seed=i, temperature=1.0), f"{count}.{i}")
                for i in range(count)
            ]
            groups = engine.run(sampled(engine, requests))
            found[f"{name} {count}"] = [[(one.token_ids, one.logprobs) for one in group] for group in groups]
        with suppress(ZeroDivisionError):
            engine.run(fails(engine))
        engine.run(engine.update_weights(learner.model, 2))
        found[f"{name} after"] = engine.run(sampled(engine, [Request((7, 5), 1, Sampling(5, seed=9), "after")]))[0][
            0
        ].token_ids
        held = everywhere(Held, engine._sampler)
        found[f"{name} held"] = collect(held.experts, [None, None])
        found[f"{name} score"] = engine.run(engine.score((5, 6, 7, 8)))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = join(sys.argv[1:])
    if isinstance(here, Member):
        code = here.serve()
        leave()
        sys.exit(code)
    assert isinstance(here, Controller)
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    here.close(0)
    leave()
    os._exit(0)
