"""`nmoe eval`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Checkpoint, Device, Seed, Temperature
from nmoe.errors import UserError


def evaluate(
    checkpoint: Checkpoint,
    environment: Annotated[
        Path | None,
        typer.Argument(
            metavar="ENVIRONMENT",
            help="The environment to evaluate on: a TOML file, a directory, or a packaged name. With "
            "--format-check the default is that of the run.",
            show_default=False,
        ),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many problems; default: 200, with --format-check 20.", show_default=False
        ),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Completions per problem.")] = 1,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    device: Device = "auto",
    best_of: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_OR_CHECKPOINT", help="A reward model or verifier that chooses among the samples of a problem."
        ),
    ] = None,
    format_check: Annotated[
        bool,
        typer.Option(
            "--format-check",
            help="Report whether the model is ready for reinforcement learning on the environment, or what to do first.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write the results here, with the answers to every problem.", show_default=False
        ),
    ] = None,
) -> None:
    """Evaluate a checkpoint on an environment.

    \b
    Example, greedy:
      nmoe eval runs/speedrun/sort_grpo sort --out sort.json
    Example, eight samples per problem:
      nmoe eval runs/speedrun/sort_grpo sort --samples 8 --temperature 0.6
    Example, the best of eight samples by a reward model, and the majority vote:
      nmoe eval runs/speedrun/sort_grpo sort --samples 8 --temperature 0.6 --best-of runs/speedrun/reward
    Example, whether a model is ready for reinforcement learning:
      nmoe eval runs/base math --format-check
    """
    if format_check:
        if samples > 1 or temperature > 0 or best_of is not None:
            raise UserError(
                "--format-check decides how problems are sampled; leave out --samples, --temperature and --best-of"
            )
        from nmoe.eval.format_check import format_check as check_format

        for line in check_format(checkpoint, environment, problems or 20, seed, device):
            typer.echo(line)
        return
    if environment is None:
        raise UserError("eval needs an ENVIRONMENT: a TOML file, a directory or a packaged name")
    from nmoe.eval.command import evaluate_command
    from nmoe.verifier.scorers import load_scorer

    asked = (problems or 200, samples, temperature, seed)
    evaluate_command(checkpoint, environment, *asked, load_scorer, best_of, out, device)
