"""The command `nmoe speedrun`: trains and evaluates a small model from start to end."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Device, Seed
from nmoe.errors import UserError


def speedrun(
    real: Annotated[bool, typer.Option("--real")] = False,
    scratch: Annotated[bool, typer.Option("--scratch")] = False,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full")] = False,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    replace: Annotated[bool, typer.Option("--replace")] = False,
    device: Device = "auto",
) -> None:
    """Train a model by reinforcement learning, from start to report.

    With --real, or neither: imports a released chat model, evaluates it, teaches it short tasks, evaluates it again and, on a
    terminal, starts a chat. With --scratch: a tokenizer, pretraining, GRPO, evaluation; this also runs, after a line that says so,
    where neither is named and the released model cannot be had. Both end in a report. An earlier speedrun in OUT is replaced; your
    own runs beside it stay. One that was broken off is replaced only with --replace, and so is a plain one with --full.

    \b
    Example:
      nmoe speedrun --seed 1 --out runs/real-1
    Example, a model from nothing:
      nmoe speedrun --scratch
    Example, the added stages after a plain speedrun:
      nmoe speedrun --scratch --full --resume

    Args:
        real: Teach a released model, SmolLM2-135M-Instruct, a download of 93 MB: the default.
        scratch: Train a small model from nothing, without a download.
        out: The directory to write to; default: runs/real with --real, runs/speedrun with --scratch.
        full: With --real all tasks; with --scratch mid-training, SFT, a verifier and self-play as well.
        resume: Resume the one in OUT, or extend it with --full; finished stages are not repeated.
        replace: Delete obstacles in OUT: files that no speedrun made or that you changed, and what --resume or --full can extend.
    """
    if real and scratch:
        raise UserError("--real and --scratch name two pipelines; choose one")
    from nmoe.speedrun import speedrun

    kind, made = speedrun("real" if real else "scratch" if scratch else None, out, seed, full, resume, device, replace)
    if kind == "real" and sys.stdin.isatty() and sys.stdout.isatty():
        from nmoe.serve.chat import chat

        print()
        chat(made, temperature=0.7, max_new_tokens=256, seed=seed, device=device)
