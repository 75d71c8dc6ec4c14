"""`nmoe runs sync`."""

from pathlib import Path
from typing import Annotated

import typer


def sync(
    target: Annotated[str, typer.Argument(metavar="HOST:DIR", help="Where to, as ssh names it; or a directory.")],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Runs, adapters and data files to copy.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be copied, and copy nothing.")] = False,
) -> None:
    """Copy code and runs to a second machine, and check them there.

    The commit of this repository goes as a git bundle to DIR/code, all else by rsync to the same path
    below DIR. Commit and SHA-256 sums are checked at the other end.

    \b
    Example:
      nmoe runs sync spare:work runs/base data/pool.jsonl --dry-run
    """
    from nmoe.runs.sync import sync as synchronise

    for line in synchronise(target, paths, dry_run):
        typer.echo(line)
