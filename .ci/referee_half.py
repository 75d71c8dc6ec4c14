"""Measures by how much the log-probabilities of a right server in half precision differ from the referee's own, which is where its
bounds for half precision come from:

    python .ci/referee_half.py [--rounds 2] [--precision bfloat16]

The servers are nmoe's, of four small models. "own routers" is without the routes that the server gives, as of a server without any;
"in float32" is the same weights' forward pass in float32 beside the one in half precision, by the same routes: as far as another
kernel's rounding can be off. It counts false alarms, also of publications, and the samples that are noticed when all their tokens
are said to be of the weights of another publication.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from referee_servers import MODELS, SHARED_S, drawn_checkpoint, serving
from torch import Tensor

from nmoe.referee.client import Client
from nmoe.referee.command import judge_of
from nmoe.referee.diagnosis import LEAST_TOKENS, ROUGH, Diagnosis, differences
from nmoe.referee.judge import Judge, Seen
from nmoe.referee.publishing import moved
from nmoe.referee.rounds import hold
from nmoe.referee.target import Asked, look, with_model

_CHECKS = ("tokens", "logprobs", "ends", "seeds", "prefixes", "lengths", "concurrency")
# Samples that are said to be of other weights.
_LONG = 20


def kept(url: str, judge: Judge, seeds: Sequence[int]) -> tuple[list[Seen], list[str]]:
    """Holds rounds, and returns every sample that they compare, and what they found, which is a false alarm."""
    found, alarms = list[Seen](), list[str]()
    compares = Diagnosis.wrong

    def noting(self: Diagnosis, seen: Sequence[Seen], right: Sequence[Tensor]) -> list[int]:
        found.extend(seen)
        return compares(self, seen, right)

    with patch.object(Diagnosis, "wrong", noting):
        for seed in seeds:
            for one in asyncio.run(hold(url, judge, seed=seed, only=_CHECKS, deadline_s=SHARED_S)).outcomes:
                alarms += [f"seed {seed}, {one.check.name}: {it.fault}: {it.seen}" for it in one.findings]
    return found, alarms


async def sampled(url: str, judge: Judge, precision: str) -> list[Seen]:
    """Returns samples of the length that a publication meets."""
    async with Client(url, "", SHARED_S) as client:
        route = with_model(await look(client), judge.model.config, precision).route
        asked = Asked((5, 6, 7), n=_LONG, max_tokens=80, seed=1, request_id="long")
        reply = route.read(asked, await client.call("POST", route.path, route.body(asked)))
    return [Seen(asked, choice) for choice in reply.choices]


def noticed(name: str, judge: Judge, seen: Sequence[Seen]) -> str:
    """Returns in words how many samples are noticed that are said to be of other weights, each of others."""
    diagnosis = Diagnosis(judge, ROUGH)
    off = [
        differences([one], diagnosis.right([one], weights=moved(judge, seed)))[part]
        for seed, one in enumerate(seen)
        for part in (slice(None), slice(20))
    ]
    by_all = [not diagnosis.rounding(seen[0]).explains(off_n) for off_n in off]
    by_largest = [bool((off_n > ROUGH).any()) for off_n in off]
    return (
        f"{name:<26} of other weights: noticed {sum(by_all[::2])} of {len(seen)}, by one token {sum(by_largest[::2])}; "
        f"of their first 20 tokens {sum(by_all[1::2])}, by one token {sum(by_largest[1::2])}"
    )


def line(name: str, judge: Judge, seen: Sequence[Seen]) -> str:
    """Returns the differences of samples in words."""
    diagnosis = Diagnosis(judge, 1.0)
    off = [differences([one], right) for one in seen for right in [diagnosis.right([one])]]
    tokens_N = torch.cat(off)
    means = torch.tensor([float(one.mean()) for one in off if len(one) >= LEAST_TOKENS])
    return (
        f"{name:<26} {len(off):>5} samples, {len(tokens_N):>6} tokens: mean {float(tokens_N.mean()):.4f}, "
        f"99.9% below {float(tokens_N.quantile(0.999)):.3f}, largest {float(tokens_N.max()):.3f}; "
        f"largest mean of a sample {float(means.max()):.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=("bfloat16", "float16"), default="bfloat16")
    options: Any = parser.parse_args()
    torch.set_num_threads(1)
    alarms = list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for number, model in enumerate(MODELS):
            checkpoint = drawn_checkpoint(Path(scratch) / model, model, seed=number)
            judge, _ = judge_of(checkpoint, options.precision)
            in_float32 = Diagnosis(Judge(copy.deepcopy(judge.model).float(), judge.lora), 1.0)
            with serving(checkpoint, precision=options.precision) as url:
                seen, of_model = kept(url, judge, range(options.rounds))
                for seed in range(options.rounds):
                    round_ = hold(url, judge, seed=seed, publish=True, only=("publishes",), deadline_s=SHARED_S)
                    for one in asyncio.run(round_).outcomes:
                        of_model += [f"seed {seed}, {one.check.name}: {it.fault}: {it.seen}" for it in one.findings]
                long = asyncio.run(sampled(url, judge, options.precision))
            alarms += [f"{model}, {one}" for one in of_model]
            print(line(model, judge, seen), flush=True)
            print(noticed(model, judge, long), flush=True)
            if judge.model.config.moe_layers:
                free = [replace(one, choice=replace(one.choice, routes=None)) for one in seen]
                print(line(f"{model}, own routers", judge, free), flush=True)
                free = [replace(one, choice=replace(one.choice, routes=None)) for one in long]
                print(noticed(f"{model}, own routers", judge, free), flush=True)
            wide = [
                replace(one, choice=replace(one.choice, logprobs=in_float32.right([one])[0].tolist())) for one in seen
            ]
            print(line(f"{model}, in float32", judge, wide), flush=True)
    print("\n".join([*alarms, f"{len(alarms)} false alarms"]))
    sys.exit(bool(alarms))


if __name__ == "__main__":  # a forked server imports this module
    main()
