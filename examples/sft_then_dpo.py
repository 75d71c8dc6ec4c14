"""Supervised fine-tuning, then DPO on its result.

    python examples/sft_then_dpo.py         ten seconds on a core

A new model over bytes first learns to answer a greeting in one of two ways, with equal shares. DPO then prefers one of them: the
margin between the implicit rewards rises from 0, and samples of the preferred answer go from about half to nearly all.
"""

import nmoe

GREETINGS = ["Hi!", "Hello!", "Good day!", "Hey!"]
POLITE, RUDE = "Welcome.", "Go away."


def share(model):
    """The share of sampled answers that are polite."""
    answers = nmoe.generate(model, GREETINGS, samples=16, max_new_tokens=16)
    return sum(answer.text.strip() == POLITE for group in answers for answer in group) / (16 * len(GREETINGS))


def main(epochs=100, steps=20, seed=0):
    base = nmoe.train_sft(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 128},
        data=[{"prompt": text, "completion": answer} for text in GREETINGS for answer in (POLITE, RUDE)],
        config={
            "records.epochs": epochs,
            "records.tokens_per_step": 512,
            "optimizer.learning_rate": 1e-2,
            "run.seed": seed,
        },
    )
    tuned = nmoe.train_dpo(
        base,
        data=[{"prompt": text, "chosen": POLITE, "rejected": RUDE} for text in GREETINGS],
        config={"run.steps": steps, "optimizer.learning_rate": 3e-4, "run.seed": seed},
    )
    return base, tuned


if __name__ == "__main__":
    base, tuned = main()
    margins = [row["rewards/margins"] for row in tuned.metrics]
    print(f"margin of the preferred answer: {margins[0]:.2f} -> {margins[-1]:.2f}")
    print(f"polite answers: {share(base):.0%} -> {share(tuned):.0%}")
