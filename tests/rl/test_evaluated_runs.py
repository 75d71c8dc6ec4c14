"""Evaluating a run and killing it leave its training as it is, to the bit, where prompts share a beginning that a cache could keep.

Where the kernels are compiled, a prefix that is found has the bits of one that is computed: the tokens found are compared, too.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe.engine.native.engine import NativeEngine
from nmoe.eval.probes import Probes
from nmoe.recipes.run_loop import Step
from nmoe.rl.rollouts import Rollouts, RolloutSampler
from nmoe.rl.train import PolicyGradient
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint

Reinforce = Callable[..., Path]

# Two blocks of the cache and more, which all prompts begin with.
SYSTEM = " ".join(["back same"] * 7)
SMALL = (
    *("--run.steps=4", "--batch.prompts_per_step=4", "--batch.group_size=3", "--batch.max_refills=0"),
    *("--checkpoint.every_steps=9", f'--environment.system="{SYSTEM}"', "--sampling.max_new_tokens=12"),
)
EVALUATED = ("--eval.0.every_steps=1", "--eval.0.problems=10")
CASES = {
    "updates": (),
    # No group is both uneven and all right.
    "skipped steps": ("--batch.solve_rate=[1.0, 1.0]",),
    "warm-up": ("--algorithm.advantage=gae", "--critic.learning_rate=1e-3", "--critic.warmup_steps=3"),
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, int]]:
    """By run and step the prompt tokens that the engine found in its cache while it sampled what is trained on."""
    tokens: dict[str, dict[int, int]] = {}
    sample = RolloutSampler.sample

    def counted(self: RolloutSampler, step: int) -> Rollouts:
        engine = self._collector._engine
        assert isinstance(engine, NativeEngine)
        before = engine.stats().prefix_hit_tokens
        rollouts = sample(self, step)
        tokens.setdefault(self._failures._run.path.name, {})[step] = engine.stats().prefix_hit_tokens - before
        return rollouts

    monkeypatch.setattr(RolloutSampler, "sample", counted)
    return tokens


def left_by(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes], dict[str, bytes]]:
    """Metrics but for times, samples with their log-probabilities, and the files of the last checkpoint."""
    rows = [
        {k: v for k, v in row.items() if not k.startswith(("time_", "tokens_per_second"))} for row in read_metrics(run)
    ]
    samples = {path.name: path.read_bytes() for path in (run / "samples").iterdir()}
    directory = resolve_checkpoint(run)
    files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return rows, samples, files


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_evaluated_or_not_killed_or_not(
    reinforce: Reinforce,
    found: dict[str, dict[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    keys: tuple[str, ...],
) -> None:
    step_of = PolicyGradient.step

    def stop_after_two(self: PolicyGradient, step: int) -> Step:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return step_of(self, step)

    def killed(name: str, *more: str) -> Path:
        with monkeypatch.context() as patched:
            patched.setattr(PolicyGradient, "step", stop_after_two)
            with pytest.raises(KeyboardInterrupt):
                reinforce(*SMALL, *keys, *more, f"--run.name={name}")
        return reinforce(*SMALL, *keys, *more, f"--run.name={name}", "--run.resume=true")

    plain = left_by(reinforce(*SMALL, *keys, "--run.name=plain"))
    assert len(plain[0]) == len(plain[1]) == 4
    assert left_by(killed("killed")) == plain
    evaluated = reinforce(*SMALL, *keys, *EVALUATED, "--run.name=evaluated")
    assert left_by(evaluated) == plain
    resumed = killed("both", *EVALUATED)
    assert left_by(resumed) == plain
    results = [{path.name: path.read_bytes() for path in (run / "eval").iterdir()} for run in (evaluated, resumed)]
    assert results[0] == results[1]
    assert len(results[0]) == 5
    firsts = [json.loads(content)["results"][0] for content in results[0].values()]
    assert len({frozenset(first["outcomes"]) for first in firsts}) == 1, "the same problems each time"
    assert all(sum(first["outcomes"].values()) == first["value"] * first["problems"] for first in firsts)
    assert all(len(first["outcomes"]) == first["problems"] for first in firsts)
    assert found == dict.fromkeys(("plain", "killed", "evaluated", "both"), dict.fromkeys(range(1, 5), 0))


@pytest.fixture
def outside(workshop: Path) -> tuple[str, ...]:
    """A second table: problems out of the distribution, at every second step."""
    where = f"--eval.1.environment.path={workshop / 'reverse.toml'}"
    return (
        where,
        "--eval.1.environment.env_id=beyond",
        "--eval.1.role=out_of_distribution",
        "--eval.1.problems=5",
        "--eval.1.every_steps=2",
    )


def test_probes_have_their_own_periods_and_sampling_and_are_compared_with_the_start(
    reinforce: Reinforce, outside: tuple[str, ...]
) -> None:
    third = ("--eval.2.samples=3", "--eval.2.temperature=0.7", "--eval.2.max_tokens=3", "--eval.2.every_steps=3")
    run = reinforce(*EVALUATED, *outside, *third, "--eval.2.problems=4", "--run.steps=3", "--run.name=outside")
    records = [json.loads(path.read_text())["results"] for path in sorted((run / "eval").iterdir())]
    asked = [[(one["role"][:3], one["mode"], one["problems"]) for one in results] for results in records]
    inside, beyond = ("in_", "greedy_pass@1", 10), ("out", "greedy_pass@1", 5)
    sampled = [("in_", mode, 4) for mode in ("sampling_pass@3", "sampling_pass@1", "pass@2", "pass@3")]
    assert asked == [[beyond, inside, *sampled], [inside], [beyond, inside], [beyond, inside, *sampled]]
    assert all("since_start" in one for results in records[1:] for one in results)
    settings = {"temperature": 0.0, "samples": 1, "max_tokens": 20, "reasoning_effort": None}
    assert records[1][0]["sampling"] == settings
    assert records[3][2]["sampling"] == {**settings, "temperature": 0.7, "samples": 3, "max_tokens": 3}


def test_each_rule_that_ends_a_run_reads_its_own_probe(
    reinforce: Reinforce, outside: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Probes] = []
    build = Probes.__init__

    def kept(self: Probes, *arguments: Any, **keywords: Any) -> None:
        build(self, *arguments, **keywords)
        found.append(self)

    monkeypatch.setattr(Probes, "__init__", kept)
    reinforce(*EVALUATED, *outside, "--eval.0.enough=0.9", "--run.steps=1", "--run.name=rules")

    def results(inside: float, beyond: float | None) -> list[dict[str, Any]]:
        rows = [("beyond", beyond), ("reverse", inside)]
        of = {"mode": "greedy_pass@1"}
        return [
            {**of, "dataset": name, "value": value, "outcomes": {str(at): float(at < 10 * value) for at in range(10)}}
            for name, value in rows
            if value is not None
        ]

    falling = [results(0.1, 0.9), results(0.2, 0.1), results(0.3, None), results(0.4, 0.1)]
    assert found[0].reason_to_end(falling[:3]) is None
    reason = found[0].reason_to_end(falling)
    assert reason is not None
    assert reason.startswith(
        "greedy_pass@1 out of distribution is worse than before in 2 evaluations in a row, 10.0% after 90.0%"
    )
    assert found[0].reason_to_end([results(0.5, 0.95)]) is None
    assert found[0].reason_to_end([results(0.9, 0.1)]) == "every source is solved at 90% or more"
