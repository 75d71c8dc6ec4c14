"""The command `nmoe referee`: find the faults of a rollout server."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Seed, finite

File = typer.Option(metavar="FILE", show_default=False)


def referee(
    url: Annotated[str, typer.Argument(metavar="URL", show_default=False)],
    checkpoint: Annotated[Path | None, typer.Option(metavar="RUN_OR_CHECKPOINT", show_default=False)] = None,
    publish: Annotated[bool, typer.Option("--publish")] = False,
    html: Annotated[Path | None, File] = None,
    baseline: Annotated[Path | None, File] = None,
    evidence: Annotated[Path | None, typer.Option(metavar="DIRECTORY", show_default=False)] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", show_default=False)] = None,
    seed: Seed = 0,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, callback=finite)] = 30,
) -> None:
    """Check a rollout server from outside: counts, log-probabilities, ends, seeds, prefixes, aborts, concurrency, publications.

    The environment variable NMOE_ENGINE_KEY has the server's key. The exit code is 1 if a check finds a fault, 2 for bad input.
    docs/referee.md has the checks and the faults that they name.

    \b
    Example:
      nmoe referee http://127.0.0.1:8000 --checkpoint runs/speedrun/base --publish

    Args:
        url: The server's address.
        checkpoint: What the server serves: its log-probabilities are compared with this model's.
        publish: Publish other weights to the server, and the checkpoint's own again at the end.
        html: Write the round as one page.
        baseline: Faults that are known do not count; the file is written where there is none.
        evidence: Write a reproduction of each fault, and the weights that were published.
        only: Make only the checks of this name or pattern, such as logprobs or "publishes.*"; repeat it for several.
        deadline: Seconds that a check may take if the server samples eight tokens in 0.3 s; publications get three times as long.
    """
    from nmoe.referee.command import hold_round

    code = hold_round(
        url,
        checkpoint,
        typer.echo,
        html=html,
        baseline=baseline,
        evidence=evidence,
        only=only or (),
        seed=seed,
        publish=publish,
        deadline_s=deadline,
    )
    raise typer.Exit(code)
