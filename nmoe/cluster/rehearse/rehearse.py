"""`nmoe rehearse`: a cluster run's own file on one small machine, with a small model, before a cluster is paid for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nmoe.cluster.rehearse.small import shape_in_full, write_small
from nmoe.cluster.rehearse.trials import TRIALS, Rehearsal, orphans
from nmoe.config.commands import RLConfig
from nmoe.config.environment import reseeded
from nmoe.config.loader import load_run
from nmoe.config.packaged import find_configuration
from nmoe.config.tables.model import ModelShape
from nmoe.engine.remote.fleet import DEADLINE_S
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.plan.engine_plan import engine_plan
from nmoe.plan.estimate import parameters_of, shape_of, size_of
from nmoe.plan.rank_plan import gib, plan, with_offload
from nmoe.preflight.check import Check, checked, failure
from nmoe.preflight.preflight import preflight
from nmoe.preflight.resources import disk
from nmoe.recipes.setup import load_tokenizer

# Tokens a second that a full engine gives each of its sequences; slower ones exist.
_TOKENS_PER_S = 20.0
# The share of problems that may be left out without a word.
_LEFT_OUT = 0.05
# Sizes of the small run.
_PROMPTS, _SAMPLES, _TOKENS, _RANK, _ENGINES, _STEPS = 4, 4, 16, 4, 2, 100_000


def rehearse(
    file: Path, overrides: Sequence[str], gpus: int | None, memory: int | None, report: Callable[[Check], None]
) -> None:
    """Reports what would go wrong: first what the configuration shows, then what becomes of faults in a small run. The cluster has
    so many `gpus` of `memory` bytes each. Raises UserError for a file that is no configuration."""
    config = load_run(file, RLConfig, overrides)
    with tempfile.TemporaryDirectory(prefix="nmoe_rehearsal_") as scratch:
        ready = True
        for check in checks(config, file, overrides, gpus, memory, Path(scratch)):
            report(check)
            ready = ready and check.status != "fail"
        if not ready:
            report(Check("faults", "warn", "not rehearsed: correct what failed first"))
            return
        name, model = find_configuration(str(file)), Path(scratch) / "model"
        small = [*overrides, *_model(config, shape_of(str(model)), Path(scratch)), *_sizes(config, Path(scratch))]
        Rehearsal(_loaded(name, small), model, name, small, report).rehearse()
        small.append("--run.name=orphans")
        report(orphans(_loaded(name, small), model, name, small))


def _loaded(file: Path, overrides: Sequence[str]) -> RLConfig:
    """Returns the small run's configuration as its parent has it: with the servers that it starts."""
    config = load_run(file, RLConfig, overrides)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"urls": ()})})


def checks(
    config: RLConfig, file: Path, overrides: Sequence[str], gpus: int | None, memory: int | None, scratch: Path
) -> Iterator[Check]:
    """Yields the checks that need no steps. The checks of `nmoe preflight` are made with the small model."""
    yield from (_staleness(config), _token_s(config), _batch(config))
    try:
        full = shape_in_full(config)
        small, missing = write_small(config, scratch / "model")
    except UserError as error:
        yield failure("model", error)
        return
    said = f"{parameters_of(str(scratch / 'model')):,} weights in small, {small.layers} layers of width {small.hidden_size}"
    if missing is None:
        yield Check("small model", "ok", f"{said}, with the run's own tokenizer")
        yield from checked("context", lambda: _context(config, full))
        yield from checked("disk", lambda: disk(config, size_of(config)))
        yield from checked("placement", lambda: _placement(config, gpus, memory))
    else:
        yield Check("small model", "warn", f"{said}, and a tokenizer of bytes: {missing}")
    overrides = [*overrides, *_model(config, small, scratch)]
    for check in preflight(load_run(file, RLConfig, overrides)):
        if check.name not in ("model", "memory", "disk", "device", "samples"):
            yield check


def _model(config: RLConfig, small: ModelConfig, scratch: Path) -> list[str]:
    """Returns the overrides by which the run has the small model."""
    model = scratch / "model"
    found = ["--model.device=cpu", "--model.precision=float32"]
    if config.model.path is not None:
        found.append(f"--model.path={model}")
    else:
        shape = {name: getattr(small, name) for name in ModelShape.model_fields}
        found += [f"--model.shape.{name}={json.dumps(value)}" for name, value in shape.items()]
    if config.model.path is None or config.model.tokenizer is not None:
        found.append(f"--model.tokenizer={model}")
    if config.lora is not None:
        found.append(f"--lora.rank={min(config.lora.rank, _RANK)}")
    return found


def _sizes(config: RLConfig, scratch: Path) -> list[str]:
    """Returns the overrides by which steps are short and faults are soon noticed."""
    found: dict[str, object] = {
        "run.directory": str(scratch / "runs"),
        "run.name": "rehearsal",
        "run.resume": False,
        ("run.steps" if config.run.steps else "run.episodes"): _STEPS,
        "batch.prompts_per_step": _PROMPTS,
        "batch.group_size": max(2, min(config.batch.group_size, _SAMPLES)),
        "batch.updates_per_step": 1,
        "sampling.max_new_tokens": _TOKENS,
        "checkpoint.every_steps": 2,
        "engine.kind": "server",
        "engine.servers": 1,
        "engine.tensor_parallel": 1,
        "engine.memory_share": 0.85,
        "engine.args": [],
        "engine.urls": ["http://127.0.0.1:9"],  # the parent names the servers that it starts
        "placement.engines": _ENGINES,
        "placement.learner_gpus": 1,
        "placement.tensor_parallel": 1,
        "placement.least_engines": 1,
        "placement.restarts": len(TRIALS),
        "placement.hung_s": 5.0,
        "placement.wait_s": 60.0,
        # Random weights are seldom right: groups of equal rewards have to be trained on, so that something is published.
        "algorithm.advantage": "reinforce_pp",
        "algorithm.multi_reward": "sum",
        "algorithm.overlong_buffer": 0,
    }
    for number in range(len(config.eval)):
        found |= {f"eval.{number}.every_steps": _STEPS, f"eval.{number}.problems": _PROMPTS}
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in found.items()]


def _staleness(config: RLConfig) -> Check:
    staleness, algorithm = config.asynchrony.max_staleness, config.algorithm
    if staleness and algorithm.correction == "none" and algorithm.loss != "dppo":
        said = f"async.max_staleness = {staleness} trains on samples of older weights, and algorithm.correction is none"
        return Check("staleness", "warn", f'{said}; leave it out, which means "tis"')
    return Check("staleness", "ok", f"samples are up to {staleness} versions old, corrected by {algorithm.correction}")


def _token_s(config: RLConfig) -> Check:
    if not config.engine.on_servers:
        return Check("token_s", "ok", "no engine servers")
    tokens = config.sampling.max_new_tokens
    seconds = DEADLINE_S + config.engine.token_s * tokens
    said = f"a sample of {tokens} tokens has {seconds:.0f} s before its server counts as lost, {tokens / seconds:.1f} tokens/s"
    if tokens / seconds > _TOKENS_PER_S:
        least = tokens / _TOKENS_PER_S - DEADLINE_S
        said += f"; a full engine gives each sequence about {_TOKENS_PER_S:.0f}"
        return Check("token_s", "warn", f"{said}: set engine.token_s to {least / tokens:.2g} or more")
    return Check("token_s", "ok", said)


def _batch(config: RLConfig) -> Check:
    groups, updates = config.batch.prompts_per_step, config.batch.updates_per_step
    ranks = config.placement.learner_gpus if config.placement is not None else 1
    for name, parts in (("batch.updates_per_step", updates), ("placement.learner_gpus", ranks)):
        if groups % parts:
            said = f"batch.prompts_per_step = {groups} is no multiple of {name} = {parts}"
            return Check("batch parts", "warn", f"{said}: parts differ in size; make it {-(-groups // parts) * parts}")
    return Check("batch parts", "ok", f"{groups} groups in {updates} updates on {ranks} ranks")


def _context(config: RLConfig, full: ModelConfig) -> Check:
    """Checks how many prompts fit with the longest completion. Raises UserError if none does."""
    context = config.model.context_tokens or full.context_tokens
    environment = Environment.from_settings(reseeded(config.environment, config.run.seed), load_tokenizer(config.model))
    environment.leave_out_overlong(context, config.sampling.max_new_tokens)
    size, longest = environment.pool.size or 1, config.sampling.max_new_tokens
    said = f"{size - environment.overlong} of {size} prompts fit {context} tokens with completions of {longest}"
    if environment.overlong > _LEFT_OUT * size:
        return Check(
            "context", "warn", f"{said}, the others are left out; lower sampling.max_new_tokens, or raise the context"
        )
    return Check("context", "ok", said if environment.pool.size else f"the first prompt fits {context} tokens")


def _placement(config: RLConfig, gpus: int | None, memory: int | None) -> Check:
    """Checks that engines and ranks fit the cluster. Raises UserError for ranks that [parallel] cannot divide."""
    placed, ranks, servers = config.placement, 1, config
    if placed is not None:
        ranks = placed.learner_gpus
        engine = {
            "servers": placed.engines,
            "tensor_parallel": placed.tensor_parallel,
            "memory_share": placed.memory_share,
        }
        servers = config.model_copy(update={"engine": config.engine.model_copy(update=engine)})
    engines = engine_plan(servers)
    of_engines = 0 if engines is None else engines.gpus
    colocated = placed is not None and placed.layout == "colocated"
    wanted = max(of_engines, ranks) if colocated else of_engines + ranks
    said = f"{ranks} GPUs to train on and {of_engines} for engines, together {wanted}"
    if gpus is not None and wanted > gpus:
        return Check(
            "placement",
            "fail",
            f"{said}, and there are {gpus}; lower placement.engines, tensor_parallel or learner_gpus",
        )
    if memory is not None:
        rank = plan(with_offload(config, ranks, min(ranks, 8), memory), ranks, min(ranks, 8))
        if rank.total > memory:
            return Check(
                "placement", "fail", f"a rank holds {gib(rank.total)}, and a GPU {gib(memory)}: {said}; add ranks"
            )
        if engines is not None and engines.missing(memory) > 0:
            return Check(
                "placement", "fail", f"an engine's GPU lacks {gib(engines.missing(memory))} of {gib(memory)}; {said}"
            )
    if gpus is None or memory is None:
        return Check("placement", "warn", f"{said}; say with --gpus and --memory-gib what there is")
    return Check("placement", "ok", f"{said}, of {gpus}")
