"""Several turns with a tool: a model learns to ask instead of guessing.

    python examples/tool_turns.py           half a minute on a core

A new model is fine-tuned on conversations, of which half call the tool `weigh` before they answer, and half give a wrong answer
at once. Reinforcement learning then rewards right answers, and says nothing of calls. Right answers rise from about 40% to above
80%, and calls with them.
"""

from pathlib import Path

import nmoe
from nmoe.envs.tools.tool import Tool

WEIGHTS = {"red": 31, "blue": 74, "green": 52, "white": 86, "black": 19, "grey": 63}
QUESTION = "How much does the {} box weigh?"


def weigh(box: str) -> int:
    """Weighs a box."""
    return WEIGHTS[box]


class Boxes(nmoe.Task):
    def generate(self, rng, difficulty):
        return {"box": rng.choice(list(WEIGHTS))}

    def prompt(self, record):
        return QUESTION.format(record["box"])

    def grade(self, record, answer):
        return answer == str(WEIGHTS[record["box"]])


def conversations():
    tools = [Tool(weigh).definition.as_function()]
    for number, (box, weight) in enumerate(WEIGHTS.items()):
        question = {"role": "user", "content": QUESTION.format(box)}
        call = {"id": "1", "type": "function", "function": {"name": "weigh", "arguments": {"box": box}}}
        answer = {"role": "tool", "tool_call_id": "1", "content": str(weight)}
        asking = {"role": "assistant", "content": "", "tool_calls": [call]}
        yield {"messages": [question, asking, answer, said(weight)], "tools": tools}
        yield {"messages": [question, said(10 + number)], "tools": tools}


def said(number):
    return {"role": "assistant", "content": str(number)}


def main(epochs=110, steps=20, seed=0):
    # The new model's tokenizer: bytes, and the words that every conversation has.
    words = [str(Tool(weigh).definition), *map(QUESTION.format, WEIGHTS)]
    directory = Path("runs/boxes")
    directory.mkdir(parents=True, exist_ok=True)
    nmoe.Tokenizer.train(words * 9, 384).save(directory)
    base = nmoe.train_sft(
        {"hidden_size": 64, "layers": 2, "heads": 4, "context_tokens": 256},
        data=list(conversations()),
        config={
            "run.seed": seed,
            "model.tokenizer": str(directory),
            "records.epochs": epochs,
            "records.tokens_per_step": 2048,
            "optimizer.learning_rate": 5e-3,
        },
    )
    return nmoe.train_rl(
        base,
        env=Boxes,
        tools=[weigh],
        config={
            "run.steps": steps,
            "run.seed": seed,
            "sampling.max_new_tokens": 64,
            "batch.prompts_per_step": 6,
            "batch.group_size": 16,
            "optimizer.learning_rate": 1e-3,
            "eval": [],
        },
    )


if __name__ == "__main__":
    run = main()
    first, last = run.metrics[0], run.metrics[-1]
    print(f"right answers: {first['correctness']:.0%} -> {last['correctness']:.0%}")
    print(f"answers after a call: {first['tool_use_ok']:.0%} -> {last['tool_use_ok']:.0%}")
