"""What each rank of a test runs: models whose parts are offloaded. A CPU is taken for the machine's memory beside an accelerator,
and where it matters which of the two something lies on, the device meta for the accelerator."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from nmoe.config.tables.model import ModelSection, ModelShape, OptimizerSection, ParallelSection
from nmoe.learner import learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.checkpoint import new_model
from nmoe.model.config import ModelConfig
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.transformer import Transformer
from nmoe.parallel import mesh, ranks
from nmoe.parallel.ranks import Ranks, is_sharded, local
from nmoe.rank_checks import loading
from nmoe.rank_checks.training import batches
from nmoe.rank_checks.twins import FAMILIES
from nmoe.recipes.setup import build_model
from nmoe.text.tokenizer import Tokenizer

_SHAPE = {
    "hidden_size": 16,
    "layers": 1,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 16,
    "context_tokens": 64,
    "intermediate_size": 16,
}
CPU, META = torch.device("cpu"), torch.device("meta")


def shared(model: Transformer) -> torch.device:
    return learner.share_model(model, Ranks(ParallelSection(offload="cpu")), CPU)


def placed() -> None:
    model = new_model(ModelConfig(**FAMILIES["qwen3_moe"]), torch.float32, META, share=shared)
    own = {id(parameter) for parameter in Lora(model, LoraSettings(2, 4.0), choose(model, ()), "", "").parameters()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert is_sharded(tensor) == (isinstance(tensor, nn.Parameter) and id(tensor) not in own), name
        assert tensor.device == (CPU if is_sharded(tensor) else META), name
    assert model.device == META
    settings = ModelSection(shape=ModelShape(**_SHAPE), tokenizer="bytes", device="cpu")
    words, offloaded = cast(Tokenizer, SimpleNamespace(vocab_size=64)), Ranks(ParallelSection(offload="cpu"))
    assert all(is_sharded(parameter) for parameter in build_model(settings, words, 0, ranks=offloaded).parameters())


def trained() -> float:
    """The largest difference, after a step, from one process."""
    config = ModelConfig(**FAMILIES["qwen3_moe"])
    found = []
    for share, group in ((None, Ranks.alone()), (shared, Ranks(ParallelSection(offload="cpu")))):
        model = new_model(config, torch.float32, CPU, share=share).initialize(3)
        one = learner.Learner(model, OptimizerSection(learning_rate=1e-2, eps=1e-3), 4, 64, ranks=group)
        one.forward_backward(batches(True, 2)[1], cross_entropy)
        one.optim_step()
        found.append(model.state_dict())
    whole, parts = found
    return max(
        float((local(part) - local(ranks.like(whole[name], part))).abs().max())
        for name, part in parts.items()
        if part.is_floating_point() and local(part).numel()
    )


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks.offloads = learner.offloads = lambda parallel, world, device: world > 1  # on a CPU, too
    mesh.CPUOffloadPolicy = partial(CPUOffloadPolicy, pin_memory=False)  # which an accelerator does
    loading._SHAPES = {"qwen3_moe": loading._SHAPES["qwen3_moe"]}
    said = loading.check_loading()
    placed()
    worst = trained()
    if dist.get_rank() == 0:
        print(said)
        print(worst)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
