"""An environment for verifiers 0.3 (v0): write a text backwards. It knows nothing of nmoe."""

import random

import verifiers as vf
from datasets import Dataset


def reversed_text(completion: list[vf.Message], answer: str) -> float:
    return float(completion[-1].content == answer)


def load_environment() -> vf.Environment:
    rng = random.Random(0)
    texts = list(dict.fromkeys("".join(rng.choices("abcdefgh", k=4)) for _ in range(1600)))
    rows = [{"question": f"Write backwards: {text}", "answer": text[::-1]} for text in texts]
    train, held_out = Dataset.from_list(rows[200:]), Dataset.from_list(rows[:200])
    return vf.SingleTurnEnv(dataset=train, eval_dataset=held_out, rubric=vf.Rubric(funcs=[reversed_text]))
