"""The commands `nmoe config ...` and `nmoe env ...`: list and show packaged configurations and environments, and check one."""

from pathlib import Path
from typing import Annotated

import typer


def list_configurations() -> None:
    """List the packaged configurations, with the command that runs each.

    \b
    Example:
      nmoe config list
    """
    from nmoe.config.listing import list_configurations

    for line in list_configurations():
        typer.echo(line)


def show_configuration(name: Annotated[str, typer.Argument()]) -> None:
    """Print a packaged configuration, to be changed and run as your own.

    \b
    Example:
      nmoe config show sort_grpo > mine.toml
      nmoe rl train mine.toml

    Args:
        name: One of `nmoe config list`.
    """
    from nmoe.config.listing import show_configuration

    typer.echo(show_configuration(name), nl=False)


def check(
    environment: Annotated[str, typer.Argument(metavar="ENVIRONMENT")],
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR_OR_RUN")] = None,
) -> None:
    """Check an environment: settings, local data, a prompt, two grades.

    A prompt is rendered, and a right and a wrong answer are graded. Of your own code only tasks and pools are
    imported, and the network is not used.

    \b
    Example:
      nmoe env check skills
    Example, with the tokens of a trained model:
      nmoe env check my_environment --tokenizer runs/speedrun

    Args:
        environment: A TOML file, a directory with environment.toml, or a packaged name.
        tokenizer: Whose tokenizer to render with; default: a byte tokenizer.
    """
    from nmoe.envs.check import check_environment

    for line in check_environment(Path(environment), tokenizer):
        typer.echo(line)


def list_environments() -> None:
    """List the named environments of nmoe and of installed packages.

    \b
    Example:
      nmoe env list
    """
    from nmoe.config.listing import list_environments

    for line in list_environments():
        typer.echo(line)


def show_environment(name: Annotated[str, typer.Argument()]) -> None:
    """Print a packaged environment, to be changed and used as your own.

    \b
    Example:
      nmoe env show sort > mine.toml
      nmoe env check mine.toml

    Args:
        name: One of `nmoe env list`.
    """
    from nmoe.config.listing import show_environment

    typer.echo(show_environment(name), nl=False)


def gc(dry_run: Annotated[bool, typer.Option("--dry-run")] = False) -> None:
    """Remove workspaces that are incomplete, too old or over quota.

    Each environment sets its age and quota. Workspaces lie in $NMOE_WORKSPACES, by default ~/.cache/nmoe/workspaces.

    \b
    Example:
      nmoe env gc --dry-run

    Args:
        dry_run: Print what would be removed, and remove nothing.
    """
    from nmoe.sandbox.workspaces.store import collect, workspaces_root

    for line in collect(workspaces_root(), dry_run=dry_run):
        typer.echo(line)
