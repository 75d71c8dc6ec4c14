"""The commands `nmoe engines` and `nmoe publish`: look at engine servers, and send them weights."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Checkpoint

Urls = Annotated[list[str], typer.Argument(metavar="URL...", show_default=False)]


def engines(urls: Urls) -> None:
    """Print what running engine servers serve: version of the weights, load and model.

    The key of the servers is in the environment variable NMOE_ENGINE_KEY. The exit code is 1 if one does not answer.

    \b
    Example:
      nmoe engines http://127.0.0.1:8000 http://127.0.0.1:8001

    Args:
        urls: Addresses of servers.
    """
    from nmoe.engine.remote.described import described

    lines, all_answer = described(urls)
    for line in lines:
        typer.echo(line)
    raise typer.Exit(not all_answer)


def publish(
    checkpoint: Checkpoint, to: Annotated[list[str], typer.Option("--to", metavar="URL", show_default=False)]
) -> None:
    """Send a checkpoint's weights to running engine servers, and compare their samples with the model.

    An adapter is sent alone, to servers that were started on one. Exit code 1: a server did not take the weights, or samples by
    other ones.

    \b
    Example:
      nmoe publish runs/rl --to http://127.0.0.1:8000 --to http://127.0.0.1:8001

    Args:
        to: The address of a server; repeat it for several.
    """
    from nmoe.rl.engines import publish_checkpoint

    figures = publish_checkpoint(Path(checkpoint), to, typer.echo)
    typer.echo(
        f"{int(figures['engines_serving'])} of {len(to)} servers sample by these weights: {int(figures['publish_bytes']):,} bytes, "
        f"largest difference of a log-probability {figures['canary_abs_max']:.2g}"
    )
    raise typer.Exit(int(figures["engines_fenced"] > 0))
