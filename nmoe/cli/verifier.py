"""`nmoe verifier`."""

import json
from typing import Annotated

import typer

from nmoe.cli.arguments import ConfigAndOverrides, configured, sum_up


def verifier(
    arguments: ConfigAndOverrides,
    prm_source: Annotated[
        str | None,
        typer.Option(
            "--prm_source",
            metavar="SOURCE",
            help="prm800k, math_shepherd, both, or a file, directory or Hugging Face name.",
        ),
    ] = None,
    prm_split: Annotated[
        str | None,
        typer.Option("--prm_split", metavar="SPLIT", help="A split, with an optional slice such as train[:1024]."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode", metavar="MODE", help="step: a label for every step; score: 0, 0.5 or 1 for whole solutions."
        ),
    ] = None,
) -> None:
    """Train a verifier on labelled solution steps.

    \b
    Example:
      nmoe verifier verifier --prm_source=prm800k --prm_split=train[:1024]
    Example, scores of whole solutions, from a file:
      nmoe verifier verifier --prm_source=labelled.jsonl --mode=score
    """
    from nmoe.config.commands.supervised import VerifierConfig

    named = {"prm_source": prm_source, "prm_split": prm_split, "mode": mode}
    overrides = [f"--verifier.{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    with configured([*arguments, *overrides], VerifierConfig) as config:
        from nmoe.verifier.train import verifier

        run = verifier(config)
    sum_up(run, "verifier")
