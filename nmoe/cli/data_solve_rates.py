"""`nmoe data solve-rates`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Checkpoint, Device, ExpertWeights, Seed, Temperature


def solve_rates(
    checkpoint: Checkpoint,
    environment: Annotated[
        Path,
        typer.Argument(
            metavar="ENVIRONMENT", help="The environment whose pool is a JSONL file: a TOML file or a directory."
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Where to write the records with their rates.")],
    problems: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many problems; default: all.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Completions per problem.")] = 8,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    expert_weights: ExpertWeights = "dequantized",
) -> None:
    """Measure how often a checkpoint solves each problem of a pool.

    Writes the pool's records with a field solve_rate. A pool of this file with easy_first = "-solve_rate" begins with the easiest.

    \b
    Example:
      nmoe data solve-rates runs/base mine.toml rated.jsonl --samples 8
    """
    from nmoe.recipes.solve_rates import write_solve_rates

    settings = (problems, samples, temperature, seed, device, expert_weights)
    typer.echo(write_solve_rates(checkpoint, environment, file, *settings))
