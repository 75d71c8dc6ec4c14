"""`nmoe replay`: repeats the sample that a replay bundle records, and reports for each check whether the result is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import ValidationError

from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.cores import choose_threads
from nmoe.envs.tools.builtin import sandbox_limits
from nmoe.errors import UserError
from nmoe.learner.passes import batch_logprobs
from nmoe.model.checkpoint import fingerprint
from nmoe.model.peft_format import is_adapter
from nmoe.model.policy import load_policy
from nmoe.model.precision import set_expert_profile
from nmoe.recipes.setup import ModelIdentity
from nmoe.rl.experience import policy_batch
from nmoe.rollout.bundle import Bundle, read_bundle
from nmoe.rollout.named_code import named_code, refuse_named_code
from nmoe.rollout.recorder import TOKENIZER
from nmoe.rollout.replay import Check, replay
from nmoe.runs.resolve import resolve_checkpoint, resolve_tokenizer
from nmoe.runs.state import saved_version
from nmoe.sandbox.api import Sandbox
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.sandbox.workspaces.prepare import Workspaces
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory

# The largest difference between engine and learner in float32 on a CPU, in nats. Below float32 there is no guarantee per token; the
# loose bound only distinguishes different models.
_BOUND = {"float32": 1e-4}
_LOOSE_BOUND = 0.5


class ReplayDifferenceError(UserError):
    """Raised if a replay differs from the record. The input is valid, so the exit code is 1."""

    exit_code = 1


def replay_command(
    path: Path, checkpoint: Path | None, tokenizer_of: Path | None, *, allow_user_code: bool = False
) -> Iterator[str]:
    """Replays a bundle, and yields a line for each check. Raises ReplayDifferenceError with the first difference, and UserError for
    bad input and, unless `allow_user_code`, for a bundle that names code to run outside a sandbox."""
    bundle = read_bundle(path)
    record = bundle.record
    yield (
        f"{path}: step {record['step']}, problem {record['problem']}, sample {record['index']}, kept as {bundle.reason}; "
        f"{record['failure']}, reward {record['reward']:g}"
    )
    if allow_user_code:
        yield from (f"{'runs':<12} {one}" for one in named_code(bundle))
    else:
        refuse_named_code(bundle)
    tokenizer = _tokenizer(bundle, checkpoint, tokenizer_of)

    async def checks() -> list[Check]:
        sandboxes, settings = _Sandboxes(bundle), bundle.settings
        workspaces = None
        if settings.workspace is not None:
            in_force = str((bundle.sandbox or {}).get("in_force"))
            workspaces = Workspaces(settings.env_id, settings.workspace, in_force)
        try:
            return [
                check
                async for check in replay(bundle, tokenizer, sandboxes, workspaces, allow_user_code=allow_user_code)
            ]
        finally:
            await sandboxes.close()
            if workspaces is not None:
                workspaces.close()

    found = asyncio.run(checks())
    torn = found[0].difference is not None
    if torn or checkpoint is None:
        logprobs = None
        yield from map(str, found)
        yield f"{'logprobs':<12} not rescored: " + ("the record is torn" if torn else "no --checkpoint")
    else:
        logprobs = rescored(bundle, bundle.trajectory(), resolve_checkpoint(checkpoint))
        *before, digests = found
        found = [*before, logprobs, digests]
        yield from map(str, found)
    differences = [f"{check.name}: {check.difference}" for check in found if check.difference is not None]
    if differences:
        more = (
            "" if len(differences) == 1 else f" (and {', '.join(line.partition(':')[0] for line in differences[1:])})"
        )
        raise ReplayDifferenceError(f"{path}: first difference: {differences[0]}{more}")
    yield "all the same"


class _Sandboxes:
    """Opens sandboxes with the recorded run's settings; the pool is started when the first tool asks for one."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._sandboxes: Sandboxes | None = None

    async def open(self, workspace: Path | None = None) -> Sandbox:
        if self._sandboxes is None:
            recorded = self._bundle.sandbox or {}
            where = Locator(Place(f"{self._bundle.path}: sandbox.settings"))
            settings = parse(recorded.get("settings", {}), SandboxSettings, where)
            # Cgroups are this machine's: a bundle from elsewhere neither names a directory to move processes in nor turns
            # limits off.
            update = {"warm": 0, "cgroup": "auto", "cgroup_directory": None, "cpus": None}
            settings = settings.model_copy(update=update)
            self._sandboxes = Sandboxes(settings, sandbox_limits(self._bundle.settings.budget))
        return await self._sandboxes.open(workspace)

    async def close(self) -> None:
        if self._sandboxes is not None:
            await self._sandboxes.close()


def rescored(bundle: Bundle, trajectory: Trajectory, directory: Path) -> Check:
    """Compares the recorded log-probabilities of the sampled tokens with the log-probabilities under the checkpoint's model, and
    returns the check with its result. Samples drawn greedily, and samples that were drawn with several versions of the weights, are
    not compared.

    Raises UserError if the checkpoint's weights are known to be others than those that sampled.
    """
    versions = sorted({version for turn in trajectory.turns for version in turn.sample.versions})
    if trajectory.sampling.temperature == 0:
        return Check("logprobs", "none to compare under greedy sampling")
    if len(versions) != 1:
        return Check("logprobs", f"none to compare, sampled with weights {versions or 'of no version'}")
    recorded = _model(bundle)
    _refuse_other_weights(bundle, recorded, versions[0], directory)
    torch.set_num_threads(choose_threads(0))
    model = load_policy(directory, getattr(torch, recorded.precision))[0].set_numerics(recorded.numerics)
    set_expert_profile(model, recorded.expert_profile)
    if recorded.context_tokens is not None:
        model.extend_context(recorded.context_tokens)
    batch = policy_batch([trajectory], torch.zeros(1), "token", 1)
    now = batch_logprobs(model, batch, batch.tokens, trajectory.sampling.temperature).double()
    positions = [position for position, sampled in enumerate(trajectory.mask) if sampled]
    gaps = (now - torch.tensor([trajectory.logprobs[position] for position in positions], dtype=torch.float64)).abs()
    bound = _BOUND.get(recorded.precision, _LOOSE_BOUND)
    compared = f"{len(positions)} tokens, apart by {gaps.mean():.1e} in the mean and {gaps.max():.1e} at most, in bound {bound:g}"
    beyond = torch.nonzero(~(gaps <= bound)).flatten().tolist()
    if not beyond:
        return Check("logprobs", compared)
    first, recorded_first = beyond[0], trajectory.logprobs[positions[beyond[0]]]
    return Check(
        "logprobs",
        compared,
        f"token {positions[first]}: {recorded_first:.6f} in the bundle, {now[first]:.6f} rescored, further apart "
        f"than {bound:g} ({len(beyond)} such tokens)",
    )


def _model(bundle: Bundle) -> ModelIdentity:
    try:
        return ModelIdentity(**bundle.record["model"])
    except ValidationError as error:
        raise UserError(
            f"{bundle.path}: its record does not say which model it is of: {bundle.record['model']}"
        ) from error


def _refuse_other_weights(bundle: Bundle, recorded: ModelIdentity, version: int, directory: Path) -> None:
    if version == 0:
        start = recorded.start
        if is_adapter(directory) or (own := fingerprint(directory)) == start:
            return
        raise UserError(
            f"{directory}: not the weights that the run started from, which these tokens were sampled with: fingerprint {own}, "
            f"and the bundle says {start}"
        )
    saved = saved_version(directory)
    if saved is not None and saved != version:
        raise UserError(
            f"{directory}: holds the weights of version {saved}, and these tokens were sampled with version {version}; name "
            f"the checkpoint of step {bundle.record['step'] - 1}, where the run kept it"
        )


def _tokenizer(bundle: Bundle, checkpoint: Path | None, named: Path | None) -> Tokenizer:
    beside = bundle.path.parent / TOKENIZER
    if named is not None:
        return Tokenizer.load(resolve_tokenizer(named))
    if beside.exists():
        return Tokenizer.load(beside)
    if checkpoint is not None:
        return Tokenizer.load(resolve_checkpoint(checkpoint))
    raise UserError(
        f"{bundle.path}: there is no {TOKENIZER}/ beside it, as in a run's replay/; name a run, checkpoint or tokenizer directory "
        "with --tokenizer"
    )
