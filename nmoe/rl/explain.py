"""`nmoe explain RUN STEP SAMPLE TOKEN`: derives all numbers of a recorded token again, from the weights that its step began with,
and says for each whether it is as recorded.

The run's own code computes them: the batch of the step's samples, its advantages, one forward pass, and the derivative of the loss
by each token's log-probability. Advantages that a teacher or a verifier's step rewards decided, and with them the shares of the
gradient, are not derived. With exact numerics they are the same to the bit, in any batch. A step whose weights
were not kept is trained up to from the nearest checkpoint before it (`--replay`).
"""

# Shapes: T predicting positions, N scored ones of the batch, Y layers, K chosen experts.

from __future__ import annotations

import asyncio
import io
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nmoe.config.commands import RLConfig
from nmoe.config.tables.rewards import VerifierRewardConfig
from nmoe.config.toml import to_toml
from nmoe.envs.prompts import token_limit
from nmoe.errors import UserError
from nmoe.learner.passes import deal, score
from nmoe.model.moe import RouterTrace
from nmoe.monitor.mismatch import highest_mismatch
from nmoe.recipes.setup import load_tokenizer, prepare_process
from nmoe.rl.advantages import Advantages
from nmoe.rl.critic import Critic
from nmoe.rl.experience import Experience
from nmoe.rl.group_rewards import GroupRewards, judged
from nmoe.rl.launch import Parts, corrected, train
from nmoe.rl.policy import policy_learner
from nmoe.rl.recording import columns_of, trained_samples
from nmoe.rl.reference import Reference
from nmoe.rl.replay_bundle import ReplayDifferenceError
from nmoe.rl.replay_run import (
    ReplayedRollouts,
    of_the_replay,
    refuse_journal,
    refuse_other_numbers,
    replayed_engine,
)
from nmoe.rl.update import PolicyUpdate
from nmoe.rollout.bundle import trajectory_of
from nmoe.rollout.journal import read_journal
from nmoe.rollout.named_code import code_of, recorded_config, refuse_code_of_training
from nmoe.rollout.replay import regraded
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.provenance import read_provenance
from nmoe.runs.state import Part, Subdirectory, load_parts
from nmoe.runs.storage import step_name, step_of
from nmoe.trajectory import Group, Trajectory


@dataclass(frozen=True)
class Finding:
    """A number derived again: `Finding("advantage", "0.25", None)`. `recorded` is the recorded number if it differs; `why_not` says
    why there is nothing to compare with."""

    name: str
    derived: str
    recorded: str | None = None
    why_not: str = ""

    def __str__(self) -> str:
        how = f"not compared: {self.why_not}" if self.why_not else "as recorded"
        if self.recorded is not None:
            how = f"DIFFERS: {self.recorded} is recorded"
        return f"{self.name:<20} {self.derived:<28} {how}"


@dataclass(frozen=True)
class _Derived:
    """A step's batch and columns, derived again. `ranges` has the scored tokens of each trajectory, by its line in the file.
    `rerouted` has the lines whose passes cannot be repeated: the learner replays the routes that older weights took, which samples/
    does not hold."""

    records: Sequence[dict[str, Any]]
    trajectories: Sequence[Trajectory]
    ranges: Mapping[int, slice]
    columns: Mapping[str, Tensor]
    gradient_sum: float
    whole: bool
    rerouted: frozenset[int]
    version: int
    weights: str


class Explainer:
    """Derives tokens of one run again. It keeps the last step's batch, so that further tokens of the step cost little."""

    def __init__(self, run: Path, *, replay: bool = False, allow_user_code: bool = False) -> None:
        """Loads the run's configuration. With `replay`, steps whose weights are gone are trained up to again. Raises UserError for
        a run without such records and, unless `allow_user_code`, for one whose own code computes the numbers. Nothing of
        the environment is loaded: a pool, a task or a reward may be code, too."""
        if not (run / "config.toml").exists() and (run / "rl" / "config.toml").exists():
            run = run / "rl"
        self.run, self._replay, self._allow_user_code = run, replay, allow_user_code
        self._config = corrected(recorded_config(run, allow_user_code=allow_user_code))
        if not allow_user_code:
            refuse_code_of_training(run, self._config)
        algorithm = self._config.algorithm
        self._unknown = _unknown_advantages(self._config)
        provenance = read_provenance(run)
        self._inexact = "" if provenance["numerics"] == "exact" else f"numerics were {provenance['numerics']}"
        prepare_process(provenance["threads"], self._config.model.device)
        self._tokenizer = load_tokenizer(self._config.model)
        limit = token_limit(self._config.environment.budget, self._config.sampling.max_new_tokens)
        self._rewards = GroupRewards(algorithm, limit)
        self._advantages = Advantages(algorithm, self._config.sampling.max_new_tokens, self._config.critic)
        self._policy: PolicyUpdate | None = None
        self._at: tuple[int, _Derived] | None = None

    def explain(self, step: int, sample: int, token: int) -> list[Finding]:
        """Derives a token again. `sample` is a line of the step's file in samples/, counted from 0, and `token` an index into its
        `token_ids`. Raises UserError if there is no such token, and for a step whose weights are not kept."""
        derived = self.step(step)
        if not 0 <= sample < len(derived.records):
            raise UserError(f"{sample}: no sample of step {step}; samples/ has 0 to {len(derived.records) - 1} of it")
        record, trajectory = derived.records[sample], derived.trajectories[sample]
        if not 0 <= token < len(record["token_ids"]):
            raise UserError(f"{token}: no token of this sample; it has 0 to {len(record['token_ids']) - 1}")
        found = [self._reward(record, trajectory)]
        mask = trajectory.mask
        found.append(_same("mask", mask[token], record["mask"][token]))
        if not mask[token]:
            return [*found, Finding("given", "by the environment", why_not="it was not sampled, and is not trained on")]
        if sample not in derived.ranges:
            why = f"the sample was not trained on ({record.get('left_out') or 'no update was made'})"
            return [*found, Finding("advantage", "none", why_not=why)]
        number = sum(mask[:token])
        at = derived.ranges[sample].start + number
        recorded = self._recorded(step, derived, sample, number)
        found.append(self._sampled(record, sample, token, derived, float(derived.columns["logprob"][at])))
        for name, label in _LABELS.items():
            if name in derived.columns:
                found.append(self._column(name, label, derived, sample, at, recorded))
        return found

    def _sampled(
        self, record: Mapping[str, Any], sample: int, token: int, derived: _Derived, logprob: float
    ) -> Finding:
        """Compares with the log-probability that the token was sampled by, if the step's weights sampled it."""
        versions = [version for version in record["versions"][: token + 1] if version >= 0]
        why_not = ""
        if versions[-1] != derived.version:
            why_not = f"version {versions[-1]} of the weights sampled it, and the step began with {derived.version}"
        elif min(versions) < derived.version and self._config.asynchrony.in_flight == "stale_kv":
            why_not = "it was sampled with keys of older weights"
        elif sample in derived.rerouted:
            why_not = _REROUTED
        if why_not:
            return Finding("log-probability", _shown(logprob), why_not=why_not)
        return self._by_the_model("log-probability", logprob, record["logprobs"][token], "sampled")

    def _by_the_model(self, label: str, derived: Any, recorded: Any, of: str = "") -> Finding:
        """Compares what a pass through the model gives. Without exact numerics its rounding depends on the batch: in float32
        numbers may be a little apart, and in half precision or of routes, which a rounding may turn, nothing can be said."""
        if not self._inexact:
            return _same(label, derived, recorded, of)
        if not isinstance(derived, float) or self._config.model.precision != "float32":
            why_not = f"{_shown(recorded)} is recorded, but {self._inexact}, whose bits depend on the batch"
            return Finding(label, _shown(derived), why_not=why_not)
        return _same(label, derived, recorded, of, within=_ROUNDING)

    def _column(
        self, name: str, label: str, derived: _Derived, sample: int, at: int, recorded: Mapping[str, Any]
    ) -> Finding:
        if self._unknown and name in ("advantage", "gradient"):
            return Finding(label, "none", why_not=self._unknown)
        column = derived.columns[name][at]
        values: Any = column.tolist()
        algorithm = self._config.algorithm
        of_batch = {"weight", "gradient"}
        if algorithm.multi_reward == "gdpo" or algorithm.advantage not in _WITHIN_GROUPS:
            of_batch.add("advantage")
        if not derived.whole and name in of_batch:
            return Finding(
                label, "none", why_not='samples/ does not hold the whole batch; [monitor] samples = "all" does'
            )
        by_rewards = algorithm.correction == "none" and not algorithm.kl_coef and self._config.critic is None
        by_rewards = by_rewards and name in ("weight", "advantage")
        # The gradient is shown as a share over the whole batch, and advantages may be normalised over it.
        of_others = name in ("weight", "advantage", "gradient")
        if not by_rewards and (sample in derived.rerouted or (of_others and derived.rerouted)):
            return Finding(label, "none", why_not=_REROUTED)
        if name == "gradient":
            share = abs(values) / derived.gradient_sum if derived.gradient_sum else 0.0
            if not recorded:
                return Finding(label, f"{share:.4%}", why_not=_NO_COLUMNS)
            other = abs(recorded["gradient"]) / recorded["gradient_sum"] if recorded["gradient_sum"] else 0.0
            if self._inexact:
                why_not = f"{other:.4%} is recorded, but {self._inexact}, whose bits depend on the batch"
                return Finding(label, f"{share:.4%}", why_not=why_not)
            same = values == recorded["gradient"] and derived.gradient_sum == recorded["gradient_sum"]
            return Finding(label, f"{share:.4%}", None if same else f"{other:.4%}")
        if name not in recorded:
            return Finding(label, _shown(values), why_not=_NO_COLUMNS)
        if by_rewards:
            return _same(label, values, recorded[name])
        return self._by_the_model(label, values, recorded[name])

    def _reward(self, record: Mapping[str, Any], trajectory: Trajectory) -> Finding:
        shown = f"{record['reward']:.9g}"
        # The record names its problem's task beside the pool's.
        tasks = {str(record["task_type"])}
        code = code_of(self._config.environment, self._config.sandbox.python, tasks)
        if code and not self._allow_user_code:
            return Finding("reward", shown, why_not="the run's own code grades; --allow-user-code runs it")
        if self._config.environment.workspace is not None or record["tool_events"]:
            return Finding("reward", shown, why_not="its grader reads files or calls of tools; nmoe replay runs them")
        check = asyncio.run(regraded(self._config.environment, self._tokenizer, trajectory))
        return Finding("reward", check.compared or shown, check.difference)

    def _recorded(self, step: int, derived: _Derived, sample: int, number: int) -> dict[str, Any]:
        """Returns the recorded columns of a token, the `number`-th that was sampled; empty if there are none."""
        path = self.run / "samples" / f"{step_name(step)}.safetensors"
        try:
            with safe_open(path, "pt") as file:
                tokens = file.get_tensor("tokens").tolist()
                at = sum(tokens[:sample]) + number
                names = [name for name in file.offset_keys() if name != "tokens"]
                found: dict[str, Any] = {name: file.get_slice(name)[at : at + 1][0].tolist() for name in names}
                return found | {"gradient_sum": float(file.metadata().get("gradient_sum", "nan"))}
        except (OSError, SafetensorError):
            return {}

    def text_of(self, id_: int) -> str:
        return self._tokenizer.decode([id_])

    def step(self, step: int) -> _Derived:
        """Derives the columns of a step's batch again, from the weights that the step began with."""
        if self._at is None or self._at[0] != step:
            self._at = None
            self._at = step, self._derive(step)
        return self._at[1]

    def _derive(self, step: int) -> _Derived:
        file = self.run / "samples" / f"{step_name(step)}.jsonl"
        if not file.exists():
            raise UserError(f"{file}: no samples of this step are recorded")
        records = read_lines(file)
        trajectories = [trajectory_of(record) for record in records]
        weights = self._load(step)
        policy = self._policy
        assert policy is not None, "loaded"
        version = policy.learner.version
        routed = policy.learner.model.config.routed_experts > 0
        rerouted = frozenset(
            line
            for line, record in enumerate(records)
            if routed and any(0 <= of < version for of in record["versions"])
        )
        members: dict[int, list[int]] = {}
        for line, record in enumerate(records):
            if record.get("left_out") in (None, "masked"):
                members.setdefault(record.get("group", 0), []).append(line)
        kept = [
            self._rewards.of(Group(trajectories[lines[0]].problem, [trajectories[line] for line in lines]))
            for lines in members.values()
        ]
        row = next((row for row in read_metrics(self.run) if row["step"] == step), {})
        whole = len({record.get("group", 0) for record in records}) == row.get("groups")
        samples = judged(kept)
        experience = self._advantages(policy.batch(samples), kept) if samples and not row.get("skipped") else None
        if experience is None:
            return _Derived(records, trajectories, {}, {}, 0.0, whole, rerouted, version, weights)
        columns = self._columns(policy, experience)
        lines = {id(trajectory): line for line, trajectory in enumerate(trajectories)}
        trained = trained_samples(samples, self._config.algorithm.mask_truncated)
        ends = [0, *accumulate(one.sampled_tokens for one in trained)]
        ranges = {lines[id(one)]: slice(*ends[at : at + 2]) for at, one in enumerate(trained)}
        total = float(columns["gradient"].double().abs().sum())
        return _Derived(records, trajectories, ranges, columns, total, whole, rerouted, version, weights)

    @torch.no_grad()
    def _columns(self, policy: PolicyUpdate, experience: Experience) -> dict[str, Tensor]:
        learner, batch = policy.learner, experience.batch
        parts: dict[str, list[Tensor]] = {"logprob": [], "entropy": [], "experts": []}
        positions = []
        (micros,) = deal(batch, learner.tokens_per_microbatch, 1)
        for on_host, positions_N, _ in micros.parts:
            micro, trace = on_host.to(learner.model.device), RouterTrace()
            outputs = score(learner.model, micro, trace, learner.temperature)
            positions.append(positions_N)
            parts["logprob"].append(outputs.logprobs_N.cpu())
            parts["entropy"].append(outputs.entropy_N.cpu())
            if trace.chosen_TK:
                parts["experts"].append(torch.stack(trace.chosen_TK, 1)[micro.scored_positions].cpu())
        order_N = torch.cat(positions).argsort()
        joined = {name: torch.cat(values)[order_N] for name, values in parts.items() if values}
        before_N = joined["logprob"]
        if batch.old_logprobs_T is not None:
            before_N = batch.old_logprobs_T[batch.scored_positions]
        entropy_N = joined["entropy"] if self._config.batch.updates == 1 else None
        found = columns_of(experience, policy.token_columns(experience, before_N, entropy_N), 0)
        return found | ({"experts": joined["experts"]} if "experts" in joined else {})

    def _load(self, step: int) -> str:
        """Loads the weights that a step began with; returns where they are from."""
        if step == 1:
            self._policy = self._built()
            return "the weights that the run began with"
        checkpoint = self.run / "checkpoints" / step_name(step - 1)
        if checkpoint.is_dir():
            self._restore(checkpoint)
            return str(checkpoint)
        before = [
            of for one in (self.run / "checkpoints").iterdir() if (of := step_of(one.name)) is not None and of < step
        ]
        nearest = max(before, default=0)
        asynchronous = self._config.asynchrony.max_staleness > 0
        first = 0 if asynchronous else nearest
        source = f"checkpoints/{step_name(first)}" if first else "the run's beginning"
        if not self._replay:
            raise UserError(
                f"{self.run}: the weights that step {step} began with were not kept; the nearest are in {source}, "
                f"{step - 1 - first} steps before. Repeat with --replay to train these steps again"
            )
        with tempfile.TemporaryDirectory(prefix="nmoe_explain_") as scratch:
            allowed = self._allow_user_code
            replayed = replayed_to(self.run, self._config, step - 1, first, Path(scratch), allow_user_code=allowed)
            self._restore(replayed)
        return f"weights trained again from {source}"

    def _built(self) -> PolicyUpdate:
        config = self._config
        learner = policy_learner(config, self._tokenizer)
        return PolicyUpdate(
            learner,
            config.algorithm,
            config.sampling,
            sizes=config.batch,
            seed=config.run.seed,
            reference=Reference.build(config, learner, self._tokenizer),
            critic=Critic.build(config, learner, self._tokenizer),
            older=config.asynchrony.max_staleness > 0,
            taught=config.distillation is not None,
        )

    def _restore(self, checkpoint: Path) -> None:
        if self._policy is None:
            self._policy = self._built()
        policy = self._policy
        parts: dict[str, Part] = {"learner": policy.learner}
        if policy.reference is not None and policy.reference.renewed:
            parts["reference"] = Subdirectory("reference", {"model": policy.reference})
        if policy.critic is not None and policy.critic.own is not None:
            parts["critic"] = Subdirectory("critic", {"learner": policy.critic.own})
        load_parts(checkpoint, parts)


def _unknown_advantages(config: RLConfig) -> str:
    """Returns why the advantages of a run cannot be derived from its records; "" if they can."""
    if config.distillation is not None:
        return "it is a teacher's ([distillation]), which is not asked again"
    if config.algorithm.step_reward_coef and any(
        isinstance(one, VerifierRewardConfig) and one.steps for one in config.environment.rewards
    ):
        return "it counts a verifier's step rewards, which samples/ does not hold"
    return ""


_LABELS = {
    "logprob": "learner's", "entropy": "entropy", "experts": "route", "advantage": "advantage", "weight": "weight in the loss",
    "gradient": "share of gradient",
}  # fmt: skip
# Estimators that give a sample of a whole group the same advantage in any batch.
_WITHIN_GROUPS = {"grpo", "dr_grpo", "rloo", "maxrl"}
# Nats by which rounding in float32 may move a token: ten times the mean that the monitor takes for a fault.
_ROUNDING = 10 * highest_mismatch("float32", 1.0)
_REROUTED = "the learner replayed routes of older weights, which samples/ does not hold"
_NO_COLUMNS = 'no columns are recorded; [monitor] samples = "all" records them'


def _same(name: str, derived: Any, recorded: Any, of: str = "", *, within: float = 0.0) -> Finding:
    same = derived == recorded or (within > 0 and abs(derived - recorded) <= within)
    return Finding(name, _shown(derived), None if same else f"{_shown(recorded)}{f' {of}' if of else ''}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(f"layer {layer}: {' '.join(map(str, picks))}" for layer, picks in enumerate(value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def replayed_to(
    run: Path, config: RLConfig, step: int, first: int, scratch: Path, *, allow_user_code: bool = False
) -> Path:
    """Trains a run again in `scratch` up to a step, from its checkpoint of step `first` (0: from its beginning), and returns the
    checkpoint of the step. A run that sampled beside its training follows its journal. Raises UserError if it may come to other
    weights, or would run code that is not allowed."""
    directory = scratch / "run"
    again = of_the_replay(config, run, directory)
    parts = Parts(steps=step)
    if config.asynchrony.max_staleness:
        recorded = read_journal(run)
        refuse_journal(run, config, recorded, step, allow_user_code=allow_user_code)
        parts = Parts(
            steps=step,
            engine=partial(replayed_engine, recorded, config.run.seed),
            sampler=partial(ReplayedRollouts, recorded=recorded),
        )
    else:
        refuse_other_numbers(run, config, allow_user_code=allow_user_code)
    if first:
        ignore = shutil.ignore_patterns("checkpoints", "samples", "replay", "plots", ".lock")
        shutil.copytree(run, directory, ignore=ignore)
        (directory / "config.toml").write_text(to_toml(again))
        for folder in ("samples", "replay"):
            (directory / folder).mkdir()
        name = step_name(first)
        shutil.copytree(run / "checkpoints" / name, directory / "checkpoints" / name)
        (directory / "checkpoints" / "latest").symlink_to(name)
        again = again.model_copy(update={"run": again.run.model_copy(update={"resume": True})})
    with redirect_stdout(io.StringIO()):  # it has a log
        train(again, parts=parts)
    return directory / "checkpoints" / step_name(step)


def explain_command(
    run: Path, step: int, sample: int, token: int, *, replay: bool, allow_user_code: bool
) -> Iterator[str]:
    """Yields a line for each number of a token. Raises ReplayDifferenceError if any is not as recorded, and UserError for bad
    input."""
    explainer = Explainer(run, replay=replay, allow_user_code=allow_user_code)
    found = explainer.explain(step, sample, token)
    derived = explainer.step(step)
    record = derived.records[sample]
    id_ = record["token_ids"][token]
    text = explainer.text_of(id_)
    yield f"{run}: step {step}, sample {record['index']} of {record['problem']}, token {token}, id {id_}, {text!r}"
    yield f"by {derived.weights}"
    yield from map(str, found)
    if differing := [one.name for one in found if one.recorded is not None]:
        raise ReplayDifferenceError(
            f"{run}: step {step}, sample {sample}, token {token}: not as recorded: {', '.join(differing)}"
        )
    left_out = [one.name for one in found if one.why_not]
    yield f"as recorded, but for what could not be compared: {', '.join(left_out)}" if left_out else "all as recorded"
