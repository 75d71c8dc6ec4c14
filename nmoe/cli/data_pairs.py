"""`nmoe data pairs`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Checkpoint, Device, ExpertWeights, Seed, Temperature


def pairs(
    checkpoint: Checkpoint,
    environment: Annotated[
        Path,
        typer.Argument(
            metavar="ENVIRONMENT", help="The environment that grades: a TOML file, a directory, or a packaged name."
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Where to write the pairs.")],
    problems: Annotated[int, typer.Option(metavar="N", min=1, help="How many problems.")] = 1000,
    samples: Annotated[int, typer.Option(metavar="N", min=2, help="Completions per problem.")] = 8,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    expert_weights: ExpertWeights = "dequantized",
) -> None:
    """Sample preference pairs from a checkpoint.

    Each pair holds a completion that the environment grades as right and one that it grades as wrong.

    \b
    Example:
      nmoe data pairs runs/speedrun/base skills pairs.jsonl --problems 4000 --samples 6
    """
    from nmoe.recipes.sampled_pairs import write_pairs

    typer.echo(write_pairs(checkpoint, environment, file, problems, samples, temperature, seed, device, expert_weights))
