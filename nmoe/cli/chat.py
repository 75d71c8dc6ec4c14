"""`nmoe chat`."""

from typing import Annotated, Literal

import typer

from nmoe.cli.arguments import Checkpoint, Device, ExpertWeights, PrecisionOfWeights, Seed, Temperature


def chat(
    checkpoint: Checkpoint,
    temperature: Temperature = 0.7,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="The maximum number of tokens per answer.")
    ] = 256,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The system message; default: that of the environment that the run was trained on.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        Literal["auto", "harmony", "chat", "text"],
        typer.Option(
            help="How the conversation becomes tokens; auto: the format of the run's environment, else Harmony or the tokenizer's "
            "chat template."
        ),
    ] = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    precision: PrecisionOfWeights = None,
    expert_weights: ExpertWeights = "dequantized",
) -> None:
    """Chat with a checkpoint in the terminal.

    Every turn is part of one conversation; /new starts another one.

    \b
    Example:
      nmoe chat runs/speedrun/sort_grpo --temperature 0
    Example, any checkpoint of a known family, by its own chat template:
      nmoe chat models/Qwen3-0.6B --system "Answer in one sentence."
    """
    from nmoe.serve.chat import chat

    chat(checkpoint, temperature, max_new_tokens, seed, system, format, device, expert_weights, precision)
