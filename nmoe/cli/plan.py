"""`nmoe plan`."""

from typing import Annotated

import typer

from nmoe.cli.arguments import ConfigAndOverrides, ForCommand, configuration_of_any


def plan(
    arguments: ConfigAndOverrides,
    world: Annotated[
        int, typer.Option("--world", metavar="N", min=1, help="Ranks that train together, one for each GPU.")
    ] = 8,
    per_node: Annotated[
        int, typer.Option("--per-node", metavar="N", min=1, help="Ranks of one machine; at most --world.")
    ] = 8,
    memory_gib: Annotated[
        float | None,
        typer.Option("--memory-gib", metavar="GIB", min=0.1, help="Memory of one GPU, to hold the plan against."),
    ] = None,
    command: ForCommand = None,
) -> None:
    """Count what a run needs on each of N ranks, without any of them.

    Bytes that a rank holds, and bytes that it sends for one optimizer step. Exits with 2 where [parallel] does not fit the
    ranks, and with 1 where a rank's part does not fit --memory-gib.

    \b
    Example:
      nmoe plan sort_grpo --world 4
    Example, a 30B model on 128 machines:
      nmoe plan qwen3_30b_a3b --world 1024 --memory-gib 80
    """
    _, config = configuration_of_any(arguments, command)
    from nmoe.plan.ranks import plan
    from nmoe.plan.table import lines

    found = plan(config, world, min(per_node, world))
    for line in lines(found, memory_gib):
        typer.echo(line)
    if memory_gib is not None and found.total > memory_gib * 2**30:
        raise typer.Exit(1)
