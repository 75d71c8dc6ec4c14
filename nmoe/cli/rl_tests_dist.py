"""`nmoe rl tests-dist`."""

from typing import Annotated

import typer

from nmoe.errors import UserError


def check_ranks(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Run this check alone; may be repeated.")
    ] = None,
) -> None:
    """Check that many ranks do together what one process does.

    To be started on ranks: over NCCL where each has a GPU of its own, else over gloo. One line a check; ends at the first that
    fails, or that takes longer than its deadline.

    \b
    Example:
      torchrun --standalone --nproc_per_node=2 -m nmoe.rl tests-dist
    """
    from nmoe.cluster.checks.run import run_checks
    from nmoe.parallel.gang import everywhere, gang

    if gang().size == 1:
        raise UserError(
            "tests-dist is about many ranks; start it as torchrun --standalone --nproc_per_node=2 -m nmoe.rl tests-dist"
        )
    import torch.distributed as dist

    typer.echo(f"{gang().size} ranks over {dist.get_backend()}")
    # Pairs of family and axes grow with the ranks, which seldom have a core each.
    everywhere(run_checks, tuple(only or ()), brief=gang().size > 4)
