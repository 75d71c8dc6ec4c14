"""What each of two ranks runs: a sharded learner beside a whole one, from the same weights and over the same batches.

Prints a line ending in "agrees" for every kind of model and rank; an assertion ends it otherwise.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import FAMILIES, tiny_family
from torch import Tensor

from nmoe.config.tables.optimizer import OptimizerSection
from nmoe.learner.batch import Batch, token_weights
from nmoe.learner.learner import Learner, PassResult
from nmoe.learner.objectives import cross_entropy
from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import Ranks, whole


def batch_of(lengths: list[int], seed: int) -> Batch:
    """Random tokens; the first and the last sequence begin alike."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    ids_2T = torch.randint(48, (2, tokens), generator=generator)
    ids_2T[0, -lengths[-1] :][:3] = ids_2T[0, :3]
    scored_T = torch.cat([torch.arange(length) >= length // 3 for length in lengths])
    weights_T = token_weights("sequence", scored_T, lengths)
    prefixes = tuple((0 if i == len(lengths) - 1 else i, 3) for i in range(len(lengths)))
    return Batch(tuple(lengths), ids_2T[0], ids_2T[1], scored_T, weights_T, prefixes=prefixes)


def model_of(family: str) -> Transformer:
    model = tiny_family(family)
    if model.moe_layers():
        model.config = model.config.model_copy(update={"router_aux_loss_coef": 0.5, "router_bias_rate": 0.01})
    return model.double().set_numerics("exact")


def near(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).norm() <= 1e-6 * theirs.norm() + 1e-12)


def check_pass(ours: PassResult, theirs: PassResult) -> None:
    assert abs(ours.loss - theirs.loss) < 1e-9
    assert abs(ours.auxiliary_loss - theirs.auxiliary_loss) < 1e-6
    assert ours.tokens.keys() == theirs.tokens.keys()
    assert all(near(ours.tokens[name], theirs.tokens[name]) for name in theirs.tokens)
    assert (ours.routing is None) == (theirs.routing is None)
    if ours.routing is not None and theirs.routing is not None:
        assert torch.equal(ours.routing.load_YE, theirs.routing.load_YE)
        assert (ours.routing.tokens, ours.routing.picks) == (theirs.routing.tokens, theirs.routing.picks)


def check_weights(ours: Learner, theirs: Learner) -> None:
    for (name, mine), other in zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True):
        assert (whole(mine) - other).abs().max() < 1e-6, name


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    settings = OptimizerSection(learning_rate=1e-2, max_grad_norm=0.5)
    for family in FAMILIES:
        sharded = Learner(model_of(family), settings, 10, 25)
        alone = Learner(model_of(family), settings, 10, 25, ranks=Ranks.alone())
        saved = directory / family
        if rank == 0:
            saved.mkdir()
        # Fewer sequences than ranks, an odd number of micro-batches, and many.
        for step, lengths in enumerate([[9], [12, 5, 20, 7, 12], [5, 12, 3, 20, 9, 1, 12, 30, 4]]):
            batch = batch_of(lengths, step)
            assert near(sharded.logprobs(batch).result(), alone.logprobs(batch).result())
            check_pass(
                sharded.forward_backward(batch, cross_entropy).result(),
                alone.forward_backward(batch, cross_entropy).result(),
            )
            for name, mine, other in zip(
                alone.optimizer.names, sharded.optimizer.parameters, alone.optimizer.parameters, strict=True
            ):
                assert mine.grad is not None
                if (
                    mine.shape[0] > 1
                ):  # of rows each rank holds a part; a single row, such as a gate's, lies on the first rank
                    assert mine.to_local().numel() < mine.numel(), name
                gradient = whole(mine.grad)
                assert near(gradient, torch.zeros_like(gradient) if other.grad is None else other.grad), name
            ours, theirs = sharded.optim_step().result(), alone.optim_step().result()
            assert ours.grad_norm is not None
            assert theirs.grad_norm is not None
            assert abs(ours.grad_norm / theirs.grad_norm - 1) < 1e-6
            check_weights(sharded, alone)
            if step == 1:
                sharded.save(saved)
        resumed = Learner(model_of(family), settings, 10, 25)
        with torch.no_grad():
            for parameter in resumed.model.parameters():
                parameter.zero_()
        resumed.load(saved)
        resumed.forward_backward(batch, cross_entropy).result()
        resumed.optim_step()
        for mine, other in zip(resumed.model.state_dict().values(), sharded.model.state_dict().values(), strict=True):
            assert torch.equal(whole(mine), whole(other))
        print(f"{family}: rank {rank} agrees", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
