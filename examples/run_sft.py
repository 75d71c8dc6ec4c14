"""Supervised fine-tuning on a file of conversations or completions, as one call.

    python examples/run_sft.py                  five seconds on a core
    python examples/run_sft.py --base runs/speedrun/base --data train.jsonl --epochs 2

Without arguments a new model over bytes learns three sums: the loss falls from 5.6 to below 0.1. The command `nmoe sft` does the
same from a TOML file; `rl_loop.py` shows the parts beneath.
"""

import argparse

import nmoe

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64}
SUMS = [{"prompt": f"{a} + {a} =", "completion": f" {a + a}"} for a in (1, 2, 3)]


def main(base=TINY, data=SUMS, epochs=100.0, learning_rate=1e-2):
    return nmoe.train_sft(
        base,
        data=data,
        config={
            "run.name": "run_sft",
            "records.epochs": epochs,
            "records.tokens_per_step": 2048,
            "optimizer.learning_rate": learning_rate,
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=TINY, help="run, checkpoint or name on the hub to start from")
    parser.add_argument("--data", default=SUMS, help="file, directory or name on the hub")
    parser.add_argument("--epochs", type=float, default=100.0)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    run = main(**vars(parser.parse_args()))
    print(f"loss: {run.metrics[0]['loss']:.2f} -> {run.metrics[-1]['loss']:.2f}; nmoe chat {run.path}")
