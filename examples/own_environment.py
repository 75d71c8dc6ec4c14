"""A task of one's own: a record, its prompt, and the grade of an answer.

    python examples/own_environment.py      fifteen seconds on a core

A new model over bytes reads "4 < " and has to write one greater digit and end there. At first one completion in a hundred ends
at all; a grade between 0 and 1 shows it the way. The share of right answers rises from 0 to above 0.9.
"""

import nmoe


class Greater(nmoe.Task):
    def generate(self, rng, difficulty):
        return {"number": rng.randint(0, 8)}

    def prompt(self, record):
        return f"{record['number']} < "

    def grade(self, record, answer):
        if answer not in "0123456789":
            return 0.1
        return 1.0 if int(answer) > record["number"] else 0.3


def main(steps=60, seed=0):
    return nmoe.train_rl(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 32},
        env={"task": Greater, "format": "boxed"},  # plain text
        config={
            "run.steps": steps,
            "run.seed": seed,
            "sampling.max_new_tokens": 3,
            "batch.prompts_per_step": 8,
            "batch.group_size": 64,
            "optimizer.learning_rate": 1e-2,
            "eval": [],
        },
    )


if __name__ == "__main__":
    run = main()
    print(f"mean grade: {run.metrics[0]['correctness']:.2f} -> {run.metrics[-1]['correctness']:.2f}")
    answers = nmoe.generate(run, [f"{number} < " for number in range(9)], max_new_tokens=3)
    print(", ".join(f"{number} < {answer.text}" for number, [answer] in enumerate(answers)))
