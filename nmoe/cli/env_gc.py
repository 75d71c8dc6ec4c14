"""`nmoe env gc`."""

from typing import Annotated

import typer


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
) -> None:
    """Remove workspaces that are incomplete, too old or over quota.

    Age and quota are those of each environment. Workspaces lie in $NMOE_WORKSPACES, by default ~/.cache/nmoe/workspaces.

    \b
    Example:
      nmoe env gc --dry-run
    """
    from nmoe.sandbox.workspaces.collect import collect
    from nmoe.sandbox.workspaces.store import workspaces_root

    for line in collect(workspaces_root(), dry_run=dry_run):
        typer.echo(line)
