"""What each rank of `test_rank_checks` runs: two steps and a checkpoint where the directory is empty; then two more steps, of
which rank 0 prints the metrics, and the weights' norms after them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from nmoe.config.tables.model import ParallelSection
from nmoe.learner.objectives import cross_entropy
from nmoe.parallel.ranks import Ranks, whole
from nmoe.rank_checks.training import learner_of
from nmoe.rank_checks.twins import batch_of, model_of


def main(family: str, directory: Path) -> None:
    learner = learner_of(model_of(family), Ranks(ParallelSection()) if dist.is_initialized() else Ranks.alone())
    steps = [batch_of(tuple(12 - (step + i) % 5 for i in range(7)), step) for step in range(4)]
    found = []
    if any(directory.iterdir()):
        learner.load(directory)
    else:
        for batch in steps[:2]:
            learner.forward_backward(batch, cross_entropy).result()
            learner.optim_step().result()
        learner.save(directory)
    for batch in steps[2:]:
        loss = learner.forward_backward(batch, cross_entropy).result().loss
        found.append({"loss": loss} | dict(learner.optim_step().result().metrics()))
    found.append({name: float(whole(one.detach()).norm()) for name, one in learner.model.named_parameters()})
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE", "1") != "1":
        dist.init_process_group("gloo")
    main(sys.argv[1], Path(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
