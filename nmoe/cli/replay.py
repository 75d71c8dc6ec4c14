"""`nmoe replay`."""

from pathlib import Path
from typing import Annotated

import typer


def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A directory in a run's replay/.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_OR_CHECKPOINT", help="The weights that sampled it, to rescore its log-probabilities."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR_OR_RUN", help="Its tokenizer, if the replay/ directory does not hold it."),
    ] = None,
    allow_user_code: Annotated[
        bool,
        typer.Option(
            "--allow-user-code",
            help="Import and run the code that the bundle names: custom tools and rewards, a workspace's bootstrap.",
        ),
    ] = False,
) -> None:
    """Repeat a recorded trajectory and report the first difference.

    Renders the prompt, parses the turns, runs the tools and grades the result; with a checkpoint, rescores the log-probabilities.
    Exits with 1 if anything differs.

    \b
    Example:
      nmoe replay runs/mine/replay/step_000010-parse_error-sort_3-2-81f0
    Example, with the weights that sampled it:
      nmoe replay runs/mine/replay/step_000011-sampled-sort_7-0-20c4 --checkpoint runs/mine/checkpoints/step_000010
    """
    from nmoe.rl.replay import replay_command

    for line in replay_command(bundle, checkpoint, tokenizer, allow_user_code=allow_user_code):
        typer.echo(line)
