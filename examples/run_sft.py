"""Supervised fine-tuning with the library instead of the command `nmoe sft`:

    python examples/run_sft.py runs/speedrun/base train.jsonl tuned --steps 50

`train.jsonl` holds conversations, or prompts with completions (docs/guides/data.md). What is written can be evaluated,
trained further, and exported (`nmoe export tuned DIRECTORY`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nmoe.config.tables.optimizer import OptimizerSection
from nmoe.config.tables.records import DatasetSettings
from nmoe.data.examples import read_examples
from nmoe.data.packing import PackedStream
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.checkpoint import load_model
from nmoe.recipes.sft import example_batch
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.renderers import make_renderer
from nmoe.text.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="run or checkpoint to start from")
    parser.add_argument("records", help="file, directory or Hugging Face name; @[a:b] behind it takes a part")
    parser.add_argument("out", type=Path, help="directory to write to")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments = parser.parse_args()

    directory = resolve_checkpoint(arguments.checkpoint)
    model, tokenizer = load_model(directory), Tokenizer.load(directory)

    # Records become tokens and labels; those that exceed the context are left out and counted.
    settings = DatasetSettings(path=arguments.records)
    examples = read_examples(settings, make_renderer(tokenizer), tokenizer, model.config.context_tokens)
    print(*examples.notes(), sep="\n")

    # Each step takes as many whole sequences as its token budget holds.
    packs = PackedStream(examples.lengths, arguments.tokens_per_step, seed=0, fingerprint=examples.fingerprint)
    print(f"{packs.steps_per_epoch} steps an epoch, {packs.utilisation:.1%} full")

    optimizer = OptimizerSection(learning_rate=arguments.learning_rate, warmup_steps=arguments.steps // 10)
    learner = Learner(model, optimizer, total_steps=arguments.steps, tokens_per_microbatch=arguments.tokens_per_step)
    for step in range(1, arguments.steps + 1):
        batch = example_batch([examples[index] for index in packs.take()])
        loss = learner.forward_backward(batch, cross_entropy).result().loss
        learner.optim_step().result()
        print(f"step {step}  loss {loss:.4f}")

    arguments.out.mkdir(parents=True, exist_ok=True)
    learner.save(arguments.out)
    tokenizer.save(arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
