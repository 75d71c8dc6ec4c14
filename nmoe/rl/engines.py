"""The engine that a run's rollouts are sampled with: in this process, on its ranks, or on engine servers."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.engine.api import Engine
from nmoe.engine.rank_sampling import sampling_engine
from nmoe.learner.learner import Learner
from nmoe.rl.canary import LearnerCanary


@contextmanager
def rollout_engine(
    section: RolloutEngineSection, learner: Learner, directory: Path, note: Callable[[str], None]
) -> Iterator[Engine]:
    """Opens the engine that [engine] asks for, with the learner's weights. Servers that the run starts end with the block; their
    logs are in `directory`/engines. Raises UserError for servers that cannot be used."""
    if section.kind == "native":
        yield sampling_engine(learner, section.max_sequences, section.cache_mb)
        return
    from nmoe.engine.remote.fleet import Fleet
    from nmoe.engine.remote.process import KEY, addresses
    from nmoe.engine.remote.weights import Format, Transport

    key = os.environ.get(KEY, "") if section.urls else secrets.token_hex(16)
    adapter = section.weights == "auto" and section.kind == "server" and learner.lora is not None
    transport: Transport = "adapter" if adapter else "disk" if section.weights == "auto" else section.weights
    format_: Format = "nmoe" if section.kind == "server" else "hf"
    base = Path(tempfile.mkdtemp(prefix="nmoe_base_"))
    try:
        if not section.urls:
            learner.export(base, "peft" if transport == "adapter" and section.kind == "server" else format_)
        model = learner.model
        servers = addresses(
            section,
            base,
            "exact" if model.exact else "fast",
            str(model.embedding.weight.dtype).removeprefix("torch."),
            key,
            directory / "engines",
        )
        fleet = Fleet(
            servers,
            learner,
            model.config,
            LearnerCanary(learner),
            transport=transport,
            format=format_,
            backend=section.group_backend,
            token_s=section.token_s,
            key=key,
            note=note,
        )
        with fleet:
            learner.hand_over(fleet)
            yield fleet
    finally:
        shutil.rmtree(base, ignore_errors=True)
