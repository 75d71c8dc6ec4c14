"""Post-training with the library: prompts, an environment and a reward function of one's own, in one file.

    python examples/run_rl.py                       a tiny model from nothing, half a minute on a core
    python examples/run_rl.py --model runs/base     a checkpoint of one's own

Every prompt is a letter, four times, and the reward is the share of the completion that goes on with it. There is no right
answer: the problems are `open`, and what the function says is all that counts. From nothing the share goes from 0.01 to 0.98.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nmoe.config.commands.rl import RLConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.rl.train import train
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

LETTERS = "aeiou"


def share(completions: list[str], letter: list[str], **columns: Any) -> list[float]:
    """Of each completion, the share of its characters that are the letter of its record. The signature is TRL's: `letter` is a
    column of the records below."""
    return [
        completion.count(wanted) / max(len(completion), 1)
        for completion, wanted in zip(completions, letter, strict=True)
    ]


def environment(prompts: Path) -> EnvironmentSettings:
    """What a TOML file of an environment says, in Python."""
    prompts.write_text("".join(json.dumps({"prompt": c * 4, "letter": c}) + "\n" for c in LETTERS))
    return EnvironmentSettings.model_validate(
        {
            "env_id": "letters",
            "format": "boxed",  # plain text; completions are strings, in the other formats lists of messages
            "task_pool": {"type": "jsonl", "path": str(prompts), "task_type": "open"},
            "rewards": [{"type": "function", "name": "share", "call": f"{Path(__file__).stem}:share"}],
        }
    )


def configuration(directory: Path, model: Path | None, steps: int) -> RLConfig:
    """What a TOML file of a run says, in Python."""
    section: dict[str, Any] = {"path": str(model)}
    if model is None:
        Tokenizer.train((), SMALLEST_VOCABULARY).save(directory / "tokenizer")  # every byte is a token
        shape = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
        section = {"shape": shape | {"context_tokens": 64}, "tokenizer": str(directory / "tokenizer")}
    return RLConfig.model_validate(
        {
            "run": {"name": "letters", "directory": str(directory), "steps": steps},
            "model": section,
            "environment": environment(directory / "prompts.jsonl"),
            "sampling": {"max_new_tokens": 16},
            "batch": {"prompts_per_step": 5, "group_size": 32},
            "optimizer": {"learning_rate": 1e-2 if model is None else 1e-5},
            "eval": {"every_steps": 0},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Post-train a model on an environment of one's own.")
    parser.add_argument("--model", type=Path, help="a run or checkpoint to start from; without it, a tiny new model")
    parser.add_argument("--directory", type=Path, default=Path("runs/run_rl"), help="where everything is written to")
    parser.add_argument("--steps", type=int, default=80)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    run = train(configuration(arguments.directory, arguments.model, arguments.steps))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print(
        f"share of the wanted letter: {metrics[0]['reward/share']:.2f} -> {metrics[-1]['reward/share']:.2f}, in {run}"
    )


if __name__ == "__main__":
    main()
