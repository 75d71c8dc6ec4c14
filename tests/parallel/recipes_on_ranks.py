"""What each rank of test_recipes_on_ranks.py runs: recipes, one after another.

    torchrun --nproc_per_node=2 recipes_on_ranks.py JOBS.json

JOBS.json is a list of `[recipe, configuration, [override, ...]]`, with recipes by the names in `RECIPES`.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nmoe.config.commands import (
    DPOConfig,
    PretrainConfig,
    RewardConfig,
    RLConfig,
    SelfplayConfig,
    SFTConfig,
    VerifierConfig,
)
from nmoe.config.loader import load_run
from nmoe.data.documents import DocumentReader
from nmoe.data.spans import Span
from nmoe.parallel.gang import Controller, Member
from nmoe.parallel.join import join, leave
from nmoe.recipes.dpo import dpo
from nmoe.recipes.pretrain import pretrain
from nmoe.recipes.reward_model import train_reward_model
from nmoe.recipes.sft import sft
from nmoe.rl.launch import train
from nmoe.selfplay.loop import selfplay
from nmoe.verifier.train import verifier

RECIPES: dict[str, tuple[Callable[[Any], Path], Any]] = {
    "pretrain": (pretrain, PretrainConfig),
    "sft": (sft, SFTConfig),
    "dpo": (dpo, DPOConfig),
    "reward": (train_reward_model, RewardConfig),
    "rl": (train, RLConfig),
    "verifier": (verifier, VerifierConfig),
    "selfplay": (selfplay, SelfplayConfig),
}


def run(jobs: list[tuple[str, str, list[str]]]) -> list[Path]:
    """Runs every job and returns the run directories."""
    return [RECIPES[name][0](load_run(Path(path), RECIPES[name][1], more)) for name, path, more in jobs]


def no_member_reads(reader: DocumentReader, span: Span) -> None:
    raise AssertionError(f"{span}: rank 0 reads the documents, and the other ranks receive their sequences")


if __name__ == "__main__":
    gang = join(sys.argv[1:])
    if isinstance(gang, Member):
        DocumentReader.read = DocumentReader.check = no_member_reads  # type: ignore[assignment]
        code = gang.serve()
        leave()
        sys.exit(code)
    assert isinstance(gang, Controller)
    try:
        run(json.loads(Path(sys.argv[1]).read_text()))
    except BaseException:
        gang.close(1)
        raise
    gang.close(0)
    leave()
    os._exit(0)
