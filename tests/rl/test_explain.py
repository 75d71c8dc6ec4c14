"""`nmoe explain`: the numbers of recorded tokens, derived again."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from nmoe.errors import UserError
from nmoe.rl.explain import Explainer, Finding, explain_command
from nmoe.rl.replay_bundle import ReplayDifferenceError
from nmoe.runs.ledger import read_lines

# documented: nmoe explain runs/mine 3 0 7
# documented: nmoe explain runs/mine 4 0 7 --replay

Reinforce = Callable[..., Path]
EXACT = (
    *("--run.steps=4", "--batch.prompts_per_step=4", "--batch.group_size=4", "--monitor.samples=all"),
    *("--model.numerics=exact", "--checkpoint.every_steps=1", "--checkpoint.keep=9"),
)


ALL = {
    *("reward", "mask", "log-probability", "learner's", "entropy", "route", "advantage"),
    *("weight in the loss", "share of gradient"),
}


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in found}


def sampled_token(run: Path, step: int) -> tuple[int, int]:
    """A token that was trained on, as line and index."""
    records = read_lines(run / f"samples/step_{step:06d}.jsonl")
    return next((line, one["mask"].index(1) + 2) for line, one in enumerate(records) if one["left_out"] is None)


def test_random_tokens_are_the_same_to_the_bit(reinforce: Reinforce) -> None:
    run = reinforce(*EXACT)
    draw, explainer = random.Random(0), Explainer(run)
    tokens = []
    for step in range(1, 5):
        records = read_lines(run / f"samples/step_{step:06d}.jsonl")
        lines = [draw.randrange(len(records)) for _ in range(50)]
        tokens += [(step, line, draw.randrange(len(records[line]["token_ids"]))) for line in lines]
    compared = 0
    for place in tokens:
        found = explainer.explain(*place)
        assert [one for one in found if one.recorded is not None] == []
        compared += {one.name for one in found if not one.why_not} >= ALL
    assert compared > 50


def test_an_altered_column_is_named(reinforce: Reinforce) -> None:
    run = reinforce(*EXACT)
    line, token = sampled_token(run, 3)
    file = run / "samples/step_000003.safetensors"
    with safe_open(file, "numpy") as opened:
        columns, about = {name: opened.get_tensor(name) for name in opened.offset_keys()}, opened.metadata()
    at = int(columns["tokens"][:line].sum()) + token
    columns["advantage"][at] = np.nextafter(columns["advantage"][at], np.float32(9))
    file.write_bytes(save(columns, about))
    lines = explain_command(run, 3, line, token, replay=False, allow_user_code=False)
    with pytest.raises(ReplayDifferenceError, match=r"not as recorded: advantage$"):
        list(lines)
    record = read_lines(run / "samples/step_000003.jsonl")
    record[line]["reward"] += 1.0
    (run / "samples/step_000003.jsonl").write_text("".join(json.dumps(one) + "\n" for one in record))
    found = by_name(Explainer(run).explain(3, line, token))
    assert {name for name, one in found.items() if one.recorded is not None} >= {"reward", "advantage"}


def test_a_step_whose_weights_are_gone_is_trained_up_to(reinforce: Reinforce) -> None:
    run = reinforce(*EXACT)
    line, token = sampled_token(run, 4)
    for step in (2, 3):
        shutil.rmtree(run / f"checkpoints/step_00000{step}")
    with pytest.raises(
        UserError, match=r"the nearest are in checkpoints/step_000001, 2 steps before. Repeat with --replay"
    ):
        Explainer(run).explain(4, line, token)
    *_, said = explain_command(run, 4, line, token, replay=True, allow_user_code=False)
    assert said == "all as recorded"
    assert not (run / "checkpoints/step_000003").exists()


def test_first_groups_alone_leave_the_batch_open(reinforce: Reinforce) -> None:
    run = reinforce(*EXACT, "--monitor.samples=first", "--run.steps=1")
    records = read_lines(run / "samples/step_000001.jsonl")
    token = records[0]["mask"].index(1)
    found = by_name(Explainer(run).explain(1, 0, token))
    assert found["log-probability"].recorded is None
    assert not found["log-probability"].why_not
    assert "does not hold the whole batch" in found["weight in the loss"].why_not
    wrong = (
        ((1, 99, 0), "no sample of step 1"),
        ((1, 0, 999), "no token of this sample"),
        ((2, 0, 0), "no samples of"),
    )
    for place, said in wrong:
        with pytest.raises(UserError, match=said):
            Explainer(run).explain(*place)


def test_a_token_costs_little_once_its_step_is_derived(reinforce: Reinforce) -> None:
    run = reinforce(*EXACT, "--run.steps=1")
    explainer, (line, token) = Explainer(run), sampled_token(run, 1)
    began = time.thread_time()
    explainer.explain(1, line, token)
    first = time.thread_time() - began
    began = time.thread_time()
    for _ in range(10):
        explainer.explain(1, line, token)
    assert (time.thread_time() - began) / 10 < max(0.2, first)


def test_advantages_of_a_teacher_are_not_derived_and_all_else_is(reinforce: Reinforce, base: Path) -> None:
    run = reinforce(*EXACT, "--run.steps=2", f"--distillation.teacher={base}")
    found = by_name(Explainer(run).explain(2, *sampled_token(run, 2)))
    assert [one for one in found.values() if one.recorded is not None] == []
    assert {name for name, one in found.items() if not one.why_not} == ALL - {"advantage", "share of gradient"}
    for name in ("advantage", "share of gradient"):
        assert found[name].why_not == "it is a teacher's ([distillation]), which is not asked again"
