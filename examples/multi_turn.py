"""An environment of several turns: a game that pays who listens.

    python examples/multi_turn.py           half a minute on a core

A new model over bytes has two guesses at one of three digits, with a hint between them. A game that is won has a score of 1, one
that is lost 0.1. Without the hints at most two games in three can be won, which is a mean of 0.7. The mean rises from 0 to above
0.9: the first guess is 2, and the second one follows the hint.
"""

import nmoe


class Guess(nmoe.MultiTurnEnv):
    def prompt(self):
        self.hidden, self.tries = self.rng.choice("123"), 2
        return "1, 2 or 3?"

    def step(self, turn):
        self.tries -= 1
        if turn.answer == self.hidden:
            return None, 1.0 if self.tries else 0.9, True
        if turn.answer not in "123":
            return None, 0.02, True
        return "more" if turn.answer < self.hidden else "less", 0.1 if self.tries else 0.0, self.tries == 0


def main(steps=120, seed=0):
    return nmoe.train_rl(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 48},
        env={"task": Guess, "format": "boxed"},  # plain text
        config={
            "run.steps": steps,
            "run.seed": seed,
            "sampling.max_new_tokens": 6,  # of both turns together
            "batch.prompts_per_step": 12,
            "batch.group_size": 16,
            "optimizer.learning_rate": 1.2e-2,
            "eval": [],
        },
    )


if __name__ == "__main__":
    run = main()
    print(f"mean score: {run.metrics[0]['correctness']:.2f} -> {run.metrics[-1]['correctness']:.2f}")
