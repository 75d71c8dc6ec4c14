"""An environment for verifiers 0.3 (v0): write a text backwards. It knows nothing of nmoe."""

import itertools
import random

import verifiers as vf
from datasets import Dataset


def backwards(completion: list[vf.Message], answer: str) -> float:
    return float(completion[-1].content == answer)


def load_environment() -> vf.Environment:
    texts = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
    random.Random(0).shuffle(texts)
    rows = [{"question": f"Write backwards: {text}", "answer": text[::-1]} for text in texts]
    train, held_out = Dataset.from_list(rows[200:]), Dataset.from_list(rows[:200])
    return vf.SingleTurnEnv(dataset=train, eval_dataset=held_out, rubric=vf.Rubric(funcs=[backwards]))
