"""`nmoe runs attempt`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import ResearchLog


def attempt(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A short description, such as higher-lr.")],
    config: Annotated[Path, typer.Option(metavar="CONFIG", help="The attempt's TOML file, in this repository.")],
    hypothesis: Annotated[str, typer.Option(metavar="TEXT", help="What the attempt is to show.")],
    log: ResearchLog = Path("research_log.md"),
) -> None:
    """Begin an attempt: branch, tag and entry of the research log.

    The branch is attempt-XX-NAME and the tag attempt-XX-start. The entry says what has changed in the
    configuration since the attempt before. The tree has to be clean; nothing but the log is written.

    \b
    Example:
      nmoe runs attempt higher-lr --config grpo.toml --hypothesis "1e-5 learns faster"
    """
    from nmoe.runs.attempts import start_attempt

    for line in start_attempt(name, config, hypothesis, log):
        typer.echo(line)
