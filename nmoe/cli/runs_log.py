"""`nmoe runs log`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import ResearchLog


def log_(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories of runs, or quoted globs.")],
    lesson: Annotated[str, typer.Option(metavar="TEXT", help="What the attempt has shown.")],
    log: ResearchLog = Path("research_log.md"),
) -> None:
    """Write an attempt's results into the research log, and commit it.

    \b
    Example:
      nmoe runs log "runs/higher-lr-*" --lesson "faster, but the entropy collapses"
    """
    from nmoe.runs.attempts import finish_attempt

    for line in finish_attempt(runs, lesson, log):
        typer.echo(line)
