"""What a policy-gradient run leaves of each step: metrics, samples, alerts, and its line of progress."""

from __future__ import annotations

from nmoe.rl.rollouts import Rollouts
from nmoe.runs.directory import RunDirectory
from nmoe.runs.progress import Progress
from nmoe.runs.watch import ExpertWatch
from nmoe.text.tokenizer import Tokenizer

# Before clipping; what lies above is kept with its problems in spikes.jsonl.
SPIKE_GRAD_NORM = 50.0


class StepRecords:
    """Writes to a run's ledger and tells its progress."""

    def __init__(self, run: RunDirectory, tokenizer: Tokenizer, progress: Progress, experts: int) -> None:
        self._ledger, self._tokenizer, self._progress = run.ledger, tokenizer, progress
        self._expert_watch = ExpertWatch(experts)

    def note(self, step: int, message: str) -> None:
        """A line for whoever watches."""
        self._progress.note(f"step {step}: {message}")

    def alert(self, step: int, message: str) -> None:
        """A line for whoever watches and in alerts.jsonl."""
        self._ledger.alert({"step": step, "message": message})
        self.note(step, message)

    def step(self, step: int, rollouts: Rollouts, metrics: dict[str, float]) -> None:
        """One line of metrics and the step's first group as samples."""
        self._ledger.metrics(step, metrics)
        if (message := self._expert_watch.observe(metrics)) is not None:
            self.alert(step, message)
        shown = rollouts.groups[0].trajectories
        self._ledger.samples(step, (t.record(step, self._tokenizer.decode(t.token_ids)) for t in shown))
        if metrics.get("grad_norm", 0.0) > SPIKE_GRAD_NORM:
            ratios = {name: metrics[name] for name in ("grad_norm", "log_ratio_raw_max", "log_ratio_min", "ratio_max")}
            problems = [group.problem.id for group in rollouts.kept]
            self._ledger.spike({"step": step, **ratios, "problems": problems})
        shown_as = {
            "reward": "reward_mean",
            "correctness": "correctness",
            "format": "format_ok",
            "length": "response_length_mean",
            "tokens/s": "tokens_per_second",
            "mismatch": "mismatch_abs_mean",
        }
        # Open problems have no correctness, a step without an update no mismatch.
        self._progress.step(step, {label: metrics[name] for label, name in shown_as.items() if name in metrics})
