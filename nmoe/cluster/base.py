"""Writes the checkpoint that the engines of a placed run start from, in a separate process, whose memory is free afterwards:

python -m nmoe.cluster.base DIRECTORY CONFIG [--section.key=value]...
"""

from __future__ import annotations

import sys
from pathlib import Path

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.errors import UserError
from nmoe.model.checkpoint import read_config
from nmoe.model.families import native
from nmoe.recipes.setup import load_tokenizer, settle
from nmoe.rl.engines import export_base
from nmoe.rl.policy import policy_learner
from nmoe.runs.resolve import resolve_checkpoint


def checkpoint_as_it_is(config: RLConfig) -> Path | None:
    """Returns the checkpoint of model.path if engines that load it have the weights with which the run begins; else None."""
    model, lora, section = config.model, config.lora, config.engine
    changed = model.context_tokens is not None or model.profile is not None
    adapted = lora is not None and (
        lora.path is not None or (section.kind == "server" and section.transport(True) == "adapter")
    )
    if model.path is None or changed or adapted:
        return None
    checkpoint = resolve_checkpoint(Path(model.path))
    return None if section.kind != "server" and read_config(checkpoint)[0] is native else checkpoint


def write(directory: Path, config: RLConfig, section: RolloutEngineSection) -> None:
    config, _ = settle(config)
    if config.run.steps == 0:  # counted in episodes, and of no weight here
        config = config.model_copy(update={"run": config.run.model_copy(update={"steps": 1})})
    export_base(section, policy_learner(config, load_tokenizer(config.model)), directory)


def main() -> None:
    directory, file, *overrides = sys.argv[1:]
    try:
        config = load_run(Path(file), RLConfig, overrides)
        write(Path(directory), config, config.engine)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
