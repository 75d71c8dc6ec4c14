"""A reward function of one's own and a list of prompts.

    python examples/own_reward.py           ten seconds on a core

A new model over bytes reads "ABC:" or "123:" and is rewarded for the share of its completion that is capital letters,
or digits. The function has TRL's signature: each field of a record is an argument, with one value for each completion. The
reward rises from 0.1 to above 0.9.
"""

import nmoe

RECORDS = [{"prompt": "ABC:", "kind": "letters"}, {"prompt": "123:", "kind": "digits"}]


def share(completions, kind, **columns):
    """The share of each completion that is of its record's kind."""
    fits = {"letters": str.isupper, "digits": str.isdigit}
    return [sum(map(fits[k], text)) / max(len(text), 1) for text, k in zip(completions, kind, strict=True)]


def main(steps=60, seed=0):
    return nmoe.train_rl(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        env={"env_id": "own_reward", "format": "boxed"},  # plain text
        data=RECORDS,
        rewards=[share],
        config={
            "run.steps": steps,
            "run.seed": seed,
            "sampling.max_new_tokens": 16,
            "batch.prompts_per_step": 2,
            "batch.group_size": 64,
            "optimizer.learning_rate": 1e-2,
        },
    )


if __name__ == "__main__":
    run = main()
    print(f"share of the kind asked for: {run.metrics[0]['reward/share']:.2f} -> {run.metrics[-1]['reward/share']:.2f}")
    print([completion.text for [completion] in nmoe.generate(run, ["ABC:", "123:"], max_new_tokens=16)])
