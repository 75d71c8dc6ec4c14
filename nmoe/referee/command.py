"""The command `nmoe referee`, below its arguments: reads the checkpoint, holds a round, writes its results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nmoe.config.tables.rollout import fault_of_urls
from nmoe.engine.remote.described import precision_of
from nmoe.engine.remote.process import KEY
from nmoe.errors import UserError
from nmoe.model.device import dtype_for
from nmoe.model.policy import load_policy, sampling_precision
from nmoe.referee.judge import Judge
from nmoe.referee.report import (
    apply_baseline,
    details_of,
    line_of,
    read_baseline,
    summary_of,
    write_page,
    write_scripts,
)
from nmoe.referee.rounds import chosen, hold
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.types import Precision


def judge_of(checkpoint: Path, precision: Precision | None) -> tuple[Judge, Precision]:
    """Loads a checkpoint as a judge, in this precision, or as its files say. Raises UserError."""
    directory, device = resolve_checkpoint(checkpoint), torch.device("cpu")
    chosen_precision = sampling_precision(directory, device, precision)
    model, lora = load_policy(directory, dtype_for(device, chosen_precision), device)
    return Judge(model, lora), chosen_precision


def hold_round(
    url: str,
    checkpoint: Path | None,
    say: Callable[[str], None],
    *,
    html: Path | None = None,
    baseline: Path | None = None,
    evidence: Path | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    publish: bool = False,
    deadline_s: float = 30.0,
) -> int:
    """Holds a round and returns the exit code: 1 where a check found a fault that the baseline has not. Raises UserError for bad
    input."""
    if (problem := fault_of_urls([url])) is not None:
        raise UserError(problem)
    if publish and checkpoint is None:
        raise UserError(
            "--publish without --checkpoint: the checkpoint's weights are published, and back again; name it"
        )
    chosen(only)
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise UserError(f"{html}: not a file in a directory that is there; --html names a file to write")
    if baseline is not None and baseline.exists():
        read_baseline(baseline)
    if evidence is not None:
        evidence.mkdir(parents=True, exist_ok=True)
    judge, precision = (None, "float32") if checkpoint is None else judge_of(checkpoint, precision_of(url))
    round_ = asyncio.run(
        hold(
            url,
            judge,
            seed=seed,
            key=os.environ.get(KEY, ""),
            only=only,
            publish=publish,
            deadline_s=deadline_s,
            keep=evidence if publish else None,
            precision=precision,
            note=lambda outcome: say("\n".join([line_of(outcome), *details_of(outcome)])),
        )
    )
    if baseline is not None:
        say(apply_baseline(round_, baseline))
    for line in summary_of(round_):
        say(line)
    if evidence is not None:
        say(f"{evidence}: {len(write_scripts(round_, evidence))} reproductions")
    if html is not None:
        write_page(round_, html)
        say(f"{html}: written")
    return int(not round_.passed)
