"""`nmoe runs compare`."""

from typing import Annotated

import typer

_HELP = "Runs: a directory, several with commas between them, or a quoted glob."


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_HELP)],
) -> None:
    """Compare runs: configurations, metrics and evaluations.

    A and B may be several seeds each; differences are B minus A, with 95% intervals where there are
    several, or where an evaluation has one.

    \b
    Example:
      nmoe runs compare runs/base runs/wide
    Example, several seeds of each:
      nmoe runs compare "runs/base-*" "runs/wide-*"
    """
    from nmoe.runs.comparison import compare_runs

    for line in compare_runs(a, b):
        typer.echo(line)
