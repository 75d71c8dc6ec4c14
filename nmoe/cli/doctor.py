"""`nmoe doctor`."""

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Show what this machine offers, and what would make runs faster or safer.

    Processor, GPUs, free cores, kernels, compiler, sandbox, packages and caches. Exits with 1 if nmoe lacks what it needs.

    \b
    Example:
      nmoe doctor
    Example, for a program:
      nmoe doctor --json
    """
    from nmoe.preflight import findings
    from nmoe.preflight.doctor import examine

    found = examine()
    if as_json:
        typer.echo(json.dumps(findings.as_json(found), indent=1))
    else:
        for line in findings.as_lines(found):
            typer.echo(line)
    if not findings.usable(found):
        raise typer.Exit(1)
