"""Trains on skyrl-gym's `gsm8k_multi_turn` with records of GSM8K, and checks that the learner read what the engine read and drew.

    python .ci/skyrl_gym_trains.py        two minutes of a core; records in shared/eval_data beside the repository

A small model first learns to answer short questions with a number that is the answer of some question, half of the time in the
form that the environment pays (`#### 72`, a third of 0.2 for each of three turns; 1 for the right number). It cannot do the sums,
but it can learn the form, and which numbers are often right. What the environment pays for held-out questions has to rise.

At every run of tokens that the loss covers, the tokens before it have to be a prompt that the engine was asked, and the run what
it then drew: in a conversation whose tokens were encoded again, neither would hold. The learner's log-probability of each token is
also compared with the one that the engine drew it by.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from check import hold

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from chat_templates import QWEN_CONTROLS, save
from real_benchmarks import REAL, Record

import nmoe
from nmoe.api.environments import environment_table
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.registry import hand_over
from nmoe.engine.api import Engine, Request
from nmoe.eval.evaluate import sample_problems
from nmoe.learner.batch import Batch
from nmoe.types import Sample

# Earlier turns stay as they were sampled, so that a conversation is one sequence.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The environment's own words in a conversation of three turns.
REASON = (
    "Please provide your step-by-step reasoning, and also include a tentative numeric answer at the end in the exact format: "
    "'#### ANSWER'."
)
ONLY = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."
FORMS = ("#### {}", "It is {}.")
TINY = {"hidden_size": 64, "layers": 2, "heads": 4, "context_tokens": 512}
LONGEST, TURNS = 110, 3
BASE_STEPS, STEPS, PROMPTS, GROUP, NEW_TOKENS = 120, 25, 16, 8, 48
HELD_OUT = 100


def records(name: str) -> list[Record]:
    """Returns the short questions as SkyRL's loader writes them."""
    with tempfile.TemporaryDirectory() as scratch:
        found = REAL[name].keep(Path(scratch), None)
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": one["question"]}],
            "env_class": "gsm8k_multi_turn",
            "reward_spec": {"method": "rule", "ground_truth": one["answer"].split("#### ")[1].replace(",", "")},
            "extra_info": {"split": name, "index": index, "max_turns": TURNS},
        }
        for index, one in enumerate(found)
        if len(one["question"]) <= LONGEST
    ]


def question(record: Record) -> str:
    return str(record["prompt"][0]["content"])


def shown(given: Sequence[Record], rng: random.Random) -> list[dict[str, Any]]:
    """Returns conversations with the answers of other questions, half of them in the form that is paid."""
    answers = [one["reward_spec"]["ground_truth"] for one in given]
    conversations = []
    for one in given:
        messages = []
        for asked in (question(one), REASON, ONLY):
            said = rng.choice(FORMS).format(rng.choice(answers))
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        conversations.append({"messages": messages})
    return conversations


def environment(given: Sequence[Record]) -> dict[str, Any]:
    return {
        "env_id": "gsm8k_multi_turn",
        "task": "skyrl_gym",
        "task_pool": {"type": "python", "call": hand_over(list(given))[0]},
        "budget": {"turns": TURNS},
    }


def paid(model: Path, given: Sequence[Record]) -> tuple[float, float]:
    """Returns the mean pay of an episode on these records, and the share of episodes with the right number, at temperature 1."""
    loaded = nmoe.load_model(model)
    tokenizer = nmoe.Tokenizer.load(model)
    settings = EnvironmentSettings.model_validate(environment_table(environment(given)))
    groups = sample_problems(
        nmoe.NativeEngine(loaded, 128),
        nmoe.Environment.from_settings(settings, tokenizer),
        TINY["context_tokens"],
        problems=len(given),
        samples=4,
        temperature=1.0,
        max_new_tokens=NEW_TOKENS * TURNS,
        seed=1,
    )
    pays = [one.grade.components["correctness"] for group in groups for one in group.trajectories]
    return sum(pays) / len(pays), sum(pay >= 1 for pay in pays) / len(pays)


@dataclass
class Drawn:
    """What the engine drew after each prompt that it was asked, and what the learner learned that was not of it."""

    after: dict[tuple[int, ...], set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))
    learned: int = 0
    others: int = 0
    turns: list[int] = field(default_factory=lambda: [0] * TURNS)

    async def sample(self, request: Request, engine: Engine) -> list[Sample]:
        samples = await engine.generate(request)
        self.after[request.prompt_ids] |= {tuple(one.token_ids) for one in samples}
        return samples

    def read(self, batch: Batch) -> None:
        """Looks every run of learned tokens up, with everything before it."""
        start = 0
        for length in batch.lengths:
            rows = slice(start, start + length)
            ids = [int(batch.inputs_T[start]), *batch.targets_T[rows].tolist()]
            at = 1
            turn = 0
            for scored, run in groupby(batch.scored_T[rows].tolist()):
                end = at + len(list(run))
                if scored:
                    self.learned += end - at
                    self.turns[turn] += 1
                    turn += 1
                    if tuple(ids[at:end]) not in self.after[tuple(ids[:at])]:
                        self.others += end - at
                at = end
            start += length


def main() -> None:
    began = time.process_time()
    os.chdir(tempfile.mkdtemp())
    given, held_out = records("gsm8k"), records("gsm8k_test")
    held_out = random.Random(1).sample(held_out, min(HELD_OUT, len(held_out)))
    words = " ".join([*map(question, given), REASON, ONLY, *FORMS])
    tokenizer = save(Path("tokenizer"), TEMPLATE, QWEN_CONTROLS, (), words)
    print(f"{len(given)} questions to train on, {len(held_out)} held out", flush=True)
    base = nmoe.train_sft(
        TINY,
        data=shown(given, random.Random(0)),
        config={
            "run.name": "base",
            "run.steps": BASE_STEPS,
            "run.threads": 1,
            "model.tokenizer": str(tokenizer),
            "records.tokens_per_step": 4096,
            "optimizer.learning_rate": 3e-3,
        },
    )
    before, right_before = paid(base.checkpoint, held_out)
    print(f"base made in {time.process_time() - began:.0f} CPU s; it is paid {before:.3f}", flush=True)
    drawn = Drawn()
    forward_backward = nmoe.Learner.forward_backward

    def read(learner: nmoe.Learner, batch: Batch, objective: Any) -> Any:
        drawn.read(batch)
        return forward_backward(learner, batch, objective)

    nmoe.Learner.forward_backward = read  # type: ignore[method-assign]
    run = nmoe.train_rl(
        base,
        env=environment(given),
        generate_fn=drawn.sample,
        config={
            "run.name": "skyrl_gym",
            "run.steps": STEPS,
            "run.threads": 1,
            "sampling.max_new_tokens": NEW_TOKENS * TURNS,
            "batch.prompts_per_step": PROMPTS,
            "batch.group_size": GROUP,
            "optimizer.learning_rate": 1e-3,
            "eval": [],
        },
    )
    after, right_after = paid(run.checkpoint, held_out)
    for row in run.metrics:
        print(f"step {row['step']}: paid {row['correctness']:.3f}, {row['turns_mean']:.2f} turns")
    seconds = time.process_time() - began
    print(f"paid for held-out questions: {before:.3f} -> {after:.3f}; right {right_before:.1%} -> {right_after:.1%}")
    print(f"runs of learned tokens by turn: {drawn.turns}; {drawn.learned} tokens; {seconds:.0f} CPU s")
    apart = max(row["mismatch_abs_max"] for row in run.metrics if "mismatch_abs_max" in row)
    hold(
        {
            "paid before": (before, 0.05, 0.15),
            "paid after": (after, before + 0.08, 3.0),
            "learned tokens that the engine did not draw after these": (drawn.others, 0, 0),
            "learned turns after the first": (sum(drawn.turns[1:]), 1000, float("inf")),
            "largest difference of a log-probability": (apart, 0, 1e-4),
            "CPU seconds": (seconds, 0, 400),
        },
        [run.path],
    )


if __name__ == "__main__":
    main()
