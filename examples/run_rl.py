"""Reinforcement learning on an environment, as one call.

    python examples/run_rl.py                   five seconds on a core
    python examples/run_rl.py --base runs/speedrun/base --env sort --steps 200

Without arguments a new model over bytes learns a task of six lines: to say capital letters other than the one that it reads. The
mean score rises from 0 to above 0.8. The command `nmoe rl train` does the same from a TOML file; `rl_loop.py` shows the parts
beneath.
"""

import argparse

import nmoe

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64}


class Later(nmoe.Task):
    """The share of eight characters that are capital letters other than the prompt's."""

    def generate(self, rng, difficulty):
        return {"prompt": rng.choice("ABCDEF")}

    def grade(self, record, answer):
        return sum(letter.isupper() and letter != record["prompt"] for letter in answer) / max(len(answer), 8)


def main(base=TINY, env=Later, steps=60, learning_rate=1e-2):
    return nmoe.train_rl(
        base,
        env=env,
        config={
            "run.name": "run_rl",
            "run.steps": steps,
            "sampling.max_new_tokens": 16 if base is TINY else 256,
            "batch.prompts_per_step": 4,
            "batch.group_size": 32,
            "optimizer.learning_rate": learning_rate,
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=TINY, help="run, checkpoint or name on the hub to start from")
    parser.add_argument("--env", default=Later, help="environment: a TOML file, a directory or a packaged name")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    run = main(**vars(parser.parse_args()))
    scores = [row["reward_mean"] for row in run.metrics]
    print(f"mean score: {scores[0]:.2f} -> {scores[-1]:.2f}; nmoe runs samples {run.path}")
