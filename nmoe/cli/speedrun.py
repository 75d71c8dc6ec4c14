"""The command `nmoe speedrun`: trains and evaluates a small model from start to end, or runs the stages of a file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import Device, Seed
from nmoe.errors import UserError


def speedrun(
    pipeline: Annotated[str | None, typer.Argument(metavar="[PIPELINE]", show_default=False)] = None,
    real: Annotated[bool, typer.Option("--real")] = False,
    scratch: Annotated[bool, typer.Option("--scratch")] = False,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full")] = False,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    replace: Annotated[bool, typer.Option("--replace")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    device: Device = "auto",
) -> None:
    """Train a model by reinforcement learning, from start to report; or run the stages of a file.

    With --real, or neither: imports a released chat model, evaluates it, teaches it short tasks, evaluates it again and, on a
    terminal, starts a chat. With --scratch: a tokenizer, pretraining, GRPO, evaluation; this also runs, after a line that says so,
    where neither is named and the released model cannot be had. Both end in a report. An earlier speedrun in OUT is replaced; your
    own runs beside it stay. One that was broken off is replaced only with --replace, and so is a plain one with --full.

    PIPELINE is a file of stages: tokenizers, training and evaluations in order (docs/guides/speedrun.md). With --resume the
    finished ones are skipped, and one that was killed goes on from its checkpoint. torchrun starts it on several ranks.

    \b
    Example:
      nmoe speedrun --seed 1 --out runs/real-1
    Example, a model from nothing:
      nmoe speedrun --scratch
    Example, the added stages after a plain speedrun:
      nmoe speedrun --scratch --full --resume
    Example, nanochat's budget run on eight GPUs, planned without running it:
      nmoe speedrun nanochat_d20 --dry-run

    Args:
        pipeline: A TOML file of stages, or a packaged name (nmoe config list).
        real: Teach a released model, SmolLM2-135M-Instruct, a download of 93 MB: the default.
        scratch: Train a small model from nothing, without a download.
        out: The directory to write to; default: runs/real with --real, runs/speedrun with --scratch, PIPELINE's own.
        full: With --real all tasks; with --scratch mid-training, SFT, a verifier and self-play as well.
        resume: Resume the one in OUT, or extend it with --full; finished stages are not repeated.
        replace: Delete obstacles in OUT: files that no speedrun made or that you changed, what --resume or --full can extend, and
            stages of PIPELINE whose settings have changed.
        dry_run: Print memory, FLOPs, tokens and steps of PIPELINE's stages, and the data that is missing; run nothing.
    """
    if real and scratch:
        raise UserError("--real and --scratch name two pipelines; choose one")
    if pipeline is not None:
        if real or scratch or full:
            raise UserError(f"{pipeline}: is a file of stages; leave out --real, --scratch and --full")
        if dry_run:
            from nmoe.speedrun.planned import Planned

            for line in Planned(pipeline, out, seed, resume, device).dry_run():
                typer.echo(line)
            return
        from nmoe.speedrun.speedrun import run_pipeline

        run_pipeline(pipeline, out, seed, resume, device, replace)
        return
    if dry_run:
        raise UserError("--dry-run plans a PIPELINE; name one, such as nanochat_d20")
    from nmoe.speedrun import speedrun

    kind, made = speedrun("real" if real else "scratch" if scratch else None, out, seed, full, resume, device, replace)
    if kind == "real" and sys.stdin.isatty() and sys.stdout.isatty():
        from nmoe.serve.chat import chat

        print()
        chat(made, temperature=0.7, max_new_tokens=256, seed=seed, device=device)
