"""`nmoe preflight`."""

import typer

from nmoe.cli.arguments import ConfigAndOverrides, ForCommand, configuration_of_any


def preflight(
    arguments: ConfigAndOverrides,
    command: ForCommand = None,
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
    name, config = configuration_of_any(arguments, command)
    from nmoe.preflight.preflight import preflight

    typer.echo(f"nmoe {name}, run {config.run.name}")
    failed = 0
    for check in preflight(config):
        typer.echo(str(check))
        failed += check.status == "fail"
    if failed:
        raise typer.Exit(2)
