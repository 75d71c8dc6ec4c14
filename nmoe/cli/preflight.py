"""`nmoe preflight`."""

from typing import Annotated

import typer

from nmoe.cli.arguments import ConfigAndOverrides, file_and_overrides, read_configuration
from nmoe.errors import UserError


def preflight(
    arguments: ConfigAndOverrides,
    command: Annotated[
        str | None,
        typer.Option(
            "--command",
            metavar="COMMAND",
            help="The command that CONFIG is for, such as dpo or 'rl train'; default: the first that has its tables.",
        ),
    ] = None,
) -> None:
    """Check a configuration before it runs.

    One line a check: ok, warn or fail, the value, and what to do. Exits with 2 if one fails. Writes nothing but the cache of
    graded gold answers.

    \b
    Example:
      nmoe preflight sort_grpo --run.steps=200
    Example, pairs for a reward model:
      nmoe preflight mine.toml --command reward
    """
    from nmoe.config.commands import COMMANDS, command_for

    name = command or command_for(*file_and_overrides(arguments))
    if name not in COMMANDS:
        raise UserError(f"--command={name}: no training command; one of {', '.join(COMMANDS)}")
    config = read_configuration(arguments, COMMANDS[name])
    from nmoe.preflight.preflight import preflight

    typer.echo(f"nmoe {name}, run {config.run.name}")
    failed = 0
    for check in preflight(config):
        typer.echo(str(check))
        failed += check.status == "fail"
    if failed:
        raise typer.Exit(2)
