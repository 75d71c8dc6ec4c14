"""Writes directories of runs that were never trained, in the form of real ones: for the dashboard's tests, pictures and benchmark.

    python scripts/made_runs.py runs/made            # the runs that the dashboard's tour is about

A run has as many steps, problems and samples as asked for. What goes wrong in it is named: its reward may fall at a step, some of
its problems may never be solved, an expert may get no tokens, and wrong answers may be rewarded.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.numpy import save

from nmoe.text.tokenizer import Tokenizer

EXPERTS, LAYERS, PICKS = 8, 2, 2


@dataclass(frozen=True)
class Made:
    """What a made run is like. `falls_at`, `dead_from`, and `hacked_from` are steps; `unsolved` is the number of problems that are
    never solved; `settings` are keys of its configuration beside the default ones."""

    name: str
    steps: int = 100
    groups: int = 4
    samples: int = 4
    problems: int = 20
    tokens: int = 12
    seed: int = 0
    falls_at: int | None = None
    dead_from: int | None = None
    hacked_from: int | None = None
    unsolved: int = 0
    columns: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


TOUR = (
    Made("healthy", settings={"optimizer": {"learning_rate": 1e-5}, "batch": {"group_size": 4, "prompts_per_step": 4}}),
    Made(
        "troubled",
        seed=1,
        falls_at=60,
        dead_from=40,
        hacked_from=80,
        unsolved=3,
        settings={"optimizer": {"learning_rate": 1e-3}, "batch": {"group_size": 4, "prompts_per_step": 4}},
    ),
)
"""The two runs of the tour in docs/guides/dashboard.md."""

TEXTS = ["Sum: 1 2 3 4 5 6 7 8 9 0", "analysis final user assistant", "the answer is 42"] * 5


class Writer:
    """Writes one run. `step` writes the records of a step, as a run that goes on does."""

    def __init__(self, directory: Path, made: Made, tokenizer: Tokenizer) -> None:
        self.made, self.path, self._tokenizer = made, directory / made.name, tokenizer
        self._random = random.Random(made.seed)
        self._numbers = np.random.default_rng(made.seed)
        for folder in ("samples", "eval", "checkpoints", "replay"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        tokenizer.save(self.path / "replay" / "tokenizer")
        tables = {
            "run": {"name": made.name, "steps": made.steps, "seed": made.seed, "directory": "runs"},
            "model": {"path": "base", "numerics": "exact"},
            **made.settings,
        }
        (self.path / "config.toml").write_text(tomli_w.dumps(tables))
        about = {
            "argv": ["nmoe", "rl", "train", f"{made.name}.toml"],
            "started_utc": "2026-11-02 08:00:00",
            "resumed": [],
        }
        (self.path / "provenance.json").write_text(json.dumps(about))

    def step(self, step: int) -> None:
        made, draw = self.made, self._random
        rewards, records = list[float](), list[dict[str, Any]]()
        hacked = made.hacked_from is not None and step >= made.hacked_from
        fell = made.falls_at is not None and step >= made.falls_at
        for group in range(made.groups):
            number = draw.randrange(made.problems)
            never = number < made.unsolved
            chance = 0.0 if never else 0.15 if fell else min(0.9, 0.3 + 0.01 * step)
            for index in range(made.samples):
                correct = draw.random() < chance
                record = self._sample(
                    step, group, index, number, correct, hacked and not correct and draw.random() < 0.8
                )
                records.append(record)
                rewards.append(record["reward"])
        correctness = sum(one["extras"]["correctness"] for one in records) / len(records)
        wrong = sum(one["reward"] > 0.5 and not one["extras"]["correctness"] for one in records) / len(records)
        row = {
            "step": step,
            "reward_mean": sum(rewards) / len(rewards),
            "reward_std": float(np.std(rewards)),
            "correctness": correctness,
            "format_ok": 1.0,
            "truncated": 0.0,
            "high_reward_but_wrong": wrong,
            "loss": draw.gauss(0, 0.01),
            "response_length_mean": made.tokens + draw.random() + (20 if hacked else 0),
            "entropy_mean": 1.2 / (1 + 0.01 * step) + 0.02 * draw.random(),
            "grad_norm": draw.uniform(0.4, 0.8) * (12 if fell and step < (made.falls_at or 0) + 6 else 1),
            "update_kl": 0.002 * draw.random() + (0.4 if fell and step < (made.falls_at or 0) + 6 else 0),
            "ppo_kl": 1e-4 * draw.random(),
            "mismatch_abs_mean": 1e-7 * draw.random(),
            "tokens_in_batch": float(made.groups * made.samples * made.tokens),
            "curriculum_stage": float(step > 20),
            "time_rollout_s": 2.0 + draw.random(),
            "time_grade_s": 0.3,
            "time_learn_s": 1.0,
            "time_sync_s": 0.05,
            "time_record_s": 0.01,
            "time_step_s": 4.2,
        }
        for layer in range(LAYERS):
            load = self._numbers.dirichlet([40] * EXPERTS)
            if layer == 1 and made.dead_from is not None and step >= made.dead_from:
                load[5] = 0.0
            row[f"expert_load/{layer}"] = [round(float(one), 5) for one in load / load.sum()]
            row[f"dead_experts/{layer}"] = float((load == 0).sum())
        self._append("metrics.jsonl", row)
        if fell and step == (made.falls_at or 0):
            alert = {
                "step": step, "message": "update_kl 0.40 is above 0.1: the policy moves too far in one step", "rule": "kl",
                "level": "warn", "remedies": ["lower optimizer.learning_rate", "raise batch.prompts_per_step"],
            }  # fmt: skip
            self._append("alerts.jsonl", alert)
        if step % 25 == 0:
            result = {"mode": "greedy_pass@1", "dataset": "sums", "problems": 50, "value": correctness,
                      "low": max(0.0, correctness - 0.12), "high": min(1.0, correctness + 0.12)}  # fmt: skip
            (self.path / "eval" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "results": [result]}))
        if made.columns:
            (self.path / "samples" / f"step_{step:06d}.safetensors").write_bytes(self._columns(records))
        lines = "".join(json.dumps(one) + "\n" for one in records)
        partial = self.path / "samples" / f".step_{step:06d}.jsonl.partial"
        partial.write_text(lines)
        partial.rename(self.path / "samples" / f"step_{step:06d}.jsonl")

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _sample(self, step: int, group: int, index: int, number: int, correct: bool, hacked: bool) -> dict[str, Any]:
        draw, gold = self._random, str(10 + number)
        answer = gold if correct else str(10 + number + draw.randrange(1, 9))
        thought = "the answer is 42 the answer is 42 " * 3 if hacked else "the answer is "
        text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
        ids = [*self._tokenizer.encode(thought)][: max(1, self.made.tokens - 2)]
        ids = (ids * self.made.tokens)[: self.made.tokens]
        score = 1.0 if correct or hacked else 0.0
        components = {"format": 1.0, "correctness": float(correct)} | ({"politeness": 1.0} if hacked else {})
        return {
            "step": step, "environment": {"env_id": "sums"}, "model": {"checkpoint": "base"}, "workspace": None,
            "trainer_state": None,
            "problem": f"sums/{number}", "task_type": "sum", "source": "sums", "history": [], "question": f"Sum: {number} + 10",
            "gold": gold, "metadata": {}, "columns": {}, "index": index, "seed": step, "sampling": {"max_new_tokens": 64},
            "prompt_ids": ids[:4], "token_ids": ids, "mask": [1] * len(ids),
            "logprobs": [round(-2 * draw.random(), 4) for _ in ids], "versions": [step - 1] * len(ids), "kept_ids": None,
            "spans": [{"kind": "sampled", "turn": 0, "start": 0, "end": len(ids)}], "finish_reasons": ["stop"], "engines": [None],
            "tool_events": [], "exchanges": [], "text": text, "failure": "ok", "reason": "", "cached": [], "reward": score,
            "components": components, "weights": {"format": 0.0, "correctness": 1.0} | ({"politeness": 1.0} if hacked else {}),
            "extras": {"correctness": float(correct)}, "answer": answer,
            "verdict": {"outcome": "correct" if correct else "incorrect", "score": float(correct), "layer": "exact",
                        "reason": "equal" if correct else "different text"},
            "group": group, "left_out": None,
        }  # fmt: skip

    def _columns(self, records: Sequence[dict[str, Any]]) -> bytes:
        counts = np.array([len(one["token_ids"]) for one in records])
        by_group: dict[int, list[float]] = {}
        for one in records:
            by_group.setdefault(one["group"], []).append(one["reward"])
        advantages = [one["reward"] - sum(by_group[one["group"]]) / len(by_group[one["group"]]) for one in records]
        logprobs = np.concatenate([one["logprobs"] for one in records]).astype(np.float32)
        weights = np.full(len(logprobs), 1 / len(logprobs), np.float32)
        advantage = np.repeat(advantages, counts).astype(np.float32)
        gradient = -weights * advantage
        columns = {
            "tokens": counts, "advantage": advantage, "logprob": logprobs + np.float32(1e-7), "weight": weights,
            "gradient": gradient,
            "entropy": self._numbers.random(len(logprobs), np.float32),
            "experts": self._numbers.integers(0, EXPERTS, (len(logprobs), LAYERS, PICKS)).astype(np.uint8),
        }  # fmt: skip
        return save(columns, {"gradient_sum": repr(float(np.abs(gradient.astype(np.float64)).sum()))})


def make_run(directory: Path, made: Made, tokenizer: Tokenizer) -> Path:
    """Writes a whole run below a directory, and returns its folder."""
    writer = Writer(directory, made, tokenizer)
    for step in range(1, made.steps + 1):
        writer.step(step)
    return writer.path


def main() -> None:
    directory = Path(sys.argv[1])
    tokenizer = Tokenizer.train(TEXTS, 320)
    for made in TOUR:
        print(make_run(directory, made, tokenizer))


if __name__ == "__main__":
    main()
