"""The command `nmoe dashboard`: shows runs in a browser."""

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUNS]...", show_default=False)] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535)] = 8080,
    export: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
) -> None:
    """Show runs in a browser: curves, alerts, samples and their tokens.

    Reads the directories of the runs, while they go on or afterwards, and writes nothing into them. The environment variable
    NMOE_DASHBOARD_KEY has the key that a browser asks for; without it only this machine is served.

    \b
    Example:
      nmoe dashboard
    Example, some runs:
      nmoe dashboard runs/base runs/wide --port 9000
    Example, one page to send to somebody:
      nmoe dashboard runs/base runs/wide --export both.html

    Args:
        runs: Runs, or directories with runs; default: runs.
        host: The address to listen on; another than this machine's own needs a key.
        port: The port to listen on; 0: any free one.
        export: Write one self-contained page instead, with all curves and a part of the samples, and print its path.
    """
    from nmoe.extras import needed_by

    with needed_by("nmoe dashboard", "serve"):
        from nmoe.dashboard.server import serve
    if export is not None:
        from nmoe.dashboard.export import export as write

        typer.echo(write(runs or [Path("runs")], export))
        return
    serve(runs or [Path("runs")], host, port)
