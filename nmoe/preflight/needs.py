"""Checks what a run requires: optional packages, credentials, services that rate samples, data sets, and models of the hub."""

from __future__ import annotations

import netrc
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from glob import glob
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from nmoe.config.base import split_path
from nmoe.config.commands import (
    PretrainConfig,
    RecordsConfig,
    RLConfig,
    RunConfig,
    SelfplayConfig,
    SupervisedConfig,
    VerifierConfig,
)
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.tables.pools import (
    CsvPool,
    GeneratedPool,
    HubPool,
    JsonlPool,
    MixturePool,
    ParquetPool,
    ProgramPool,
    ReasoningGymPool,
)
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.config.tables.rewards import ServiceKeys
from nmoe.config.tables.run import SinksSection
from nmoe.data.hub import why_not_asked
from nmoe.data.records import read_records
from nmoe.data.rows import is_pattern, local_copy, read_rows
from nmoe.envs.pools import build_order
from nmoe.errors import UserError
from nmoe.grading.gym import check_installed
from nmoe.model.shards import INDEX, SINGLE
from nmoe.parsing import json_of
from nmoe.preflight.check import Check, failure
from nmoe.runs.resolve import maker_of
from nmoe.runs.sinks.sinks import refuse_unready, trackio_remotes
from nmoe.selfplay.loop import selfplay_environment
from nmoe.verifier.train import read_data as read_labelled_steps

# Seconds that a service has to accept a connection.
_CONNECT_SECONDS = 3.0


def packages(config: RunConfig) -> Check:
    """Checks the optional packages that task pools need. Raises UserError, with the command to install it, if one is missing."""
    needed = any(isinstance(pool, ReasoningGymPool) for pool in pools_of(config))
    if needed:
        check_installed()
    return Check("packages", "ok", "reasoning-gym" if needed else "none beyond what nmoe always has")


def services(config: RunConfig) -> Check:
    """Checks that each external service that rates samples has its access token, and accepts connections on its port."""
    name, there = "services", []
    for service in (reward for one in environments_of(config) for reward in one.rewards):
        if not isinstance(service, ServiceKeys):
            continue
        if service.token_env is not None and not os.environ.get(service.token_env):
            said = f"[[rewards]] {service.name}: {service.token_env} is not set; put its token there"
            return Check(name, "fail", said)
        parts = urlsplit(service.url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        address = f"{host}:{port}"
        if parts.scheme in getproxies() and not proxy_bypass(host):
            there.append(f"{address} behind a proxy, which is not asked")
            continue
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            why = (error.strerror or str(error) or type(error).__name__).lower()
            said = (
                f"[[rewards]] {service.name}: nothing answers at {address} ({why}); start the service, or correct url"
            )
            return Check(name, "fail", said)
        there.append(address)
    return Check(name, "ok", ", ".join(dict.fromkeys(there)) or "none are asked")


def hub(config: RunConfig) -> Check:
    """Checks the data sets and models that a run reads from the Hugging Face hub, and whether the hub can be used.

    Raises UserError if the hub cannot be used and the local cache lacks one of them.
    """
    named = list(dict.fromkeys(chain(*named_on_hub(config))))
    if not named:
        return Check("hub", "ok", "nothing is read from it")
    why = why_not_asked()
    if lacking := lacking_of_hub(config):
        raise UserError(
            f"{', '.join(lacking.values())}: not in the cache, and {why}; fetch where there is a network with `hf download` (a "
            "model) and `nmoe data download` (a dataset), or name local copies"
        )
    token = "with a token" if _has_token() else "without a token, which private and gated ones need"
    return Check("hub", "ok", f"{', '.join(named)}, {token if why is None else f'from the cache alone: {why}'}")


def lacking_of_hub(config: RunConfig) -> dict[str, str]:
    """Returns the hub's data sets and models that are neither cached nor can be downloaded.

    The result maps each name to a text that names the missing files, if it is partly cached: `{"someone/sums": "someone/sums"}`.
    """
    model, data = named_on_hub(config)
    if not (model or data) or why_not_asked() is None:
        return {}
    return {
        **_uncached(model, "model"),
        **_incomplete(model, config.model.tokenizer is None),
        **_uncached(data, "dataset"),
    }


def named_on_hub(config: RunConfig) -> tuple[list[str], list[str]]:
    """Returns the names of the models, and of the data sets, that a run reads from the hub."""
    data = [name for name in names_of_data(config) if _on_hub(name) and local_copy(split_path(name)[0]) is None]
    model = [config.model.path] if config.model.path is not None and _on_hub(config.model.path) else []
    return model, data


def names_of_data(config: RunConfig) -> list[str]:
    """Returns the names of all files and datasets that a run reads, with their slices."""
    named = names_of_pools(pools_of(config))
    if isinstance(config, PretrainConfig):
        named += [source.path for source in config.data.mixture]
    if isinstance(config, RecordsConfig):
        named += [one.path for one in records_of(config)]
    return named


def names_of_pools(pools: Iterable[object]) -> list[str]:
    """Returns the names of the files and datasets that task pools read."""
    named = []
    for pool in pools:
        if isinstance(pool, HubPool):
            named.append(pool.dataset)
        elif isinstance(pool, JsonlPool | ProgramPool | CsvPool | ParquetPool):
            named.append(pool.path)
        elif isinstance(pool, MixturePool):
            named += names_of_pools(pool.sources)
    return named


def absent(names: Iterable[str]) -> list[str]:
    """Returns, without their slices, the names of data that is neither on this machine nor in the hub's cache."""
    plain = dict.fromkeys(map(_plain, names))
    there = (name for name in plain if not (glob(name) if is_pattern(name) else local_copy(name)))
    return [name for name in there if not (_on_hub(name) and not _uncached([name], "dataset"))]


def records_of(config: RecordsConfig) -> list[DatasetSettings]:
    """Returns the data sets of a supervised run: its training records, then its held-out records, if these have their
    own data set."""
    other = config.records.held_out_dataset
    return [*config.records.datasets, *([] if other is None else [other])]


def data(config: RunConfig) -> Iterator[Check]:
    """Checks that each data set can be read; yields a failed check for each that cannot, else one check for all.

    Data sets that the hub does not provide are reported by `hub` instead.
    """
    lacking = lacking_of_hub(config)
    failed: dict[str, Check] = {}
    sources = {repr(source): (name, read) for source, name, read in _sources(config) if _plain(name) not in lacking}
    for _, read in sources.values():
        try:
            read()
        except UserError as error:
            failed.setdefault(str(error), failure("data", error))
    yield from failed.values()
    if not failed and not lacking.keys() - {config.model.path}:
        yield Check("data", "ok", f"{len(sources)} data sets can be read" if sources else "none is read")


def _sources(config: RunConfig) -> Iterator[tuple[object, str, Callable[[], object]]]:
    """Yields for each data set of a run its settings, its possible name on the hub ("" if none), and a function that reads it."""
    for environment in environments_of(config):
        pool = environment.task_pool
        for one in pool.sources if isinstance(pool, MixturePool) else (pool,):
            if not isinstance(one, GeneratedPool | ReasoningGymPool):
                name = one.dataset if isinstance(one, HubPool) else ""
                yield one, name, partial(build_order, environment.env_id, one)
    if isinstance(config, PretrainConfig):
        for source in config.data.mixture:
            yield source.path, source.path, partial(_first_row, source.path)
    if isinstance(config, RecordsConfig):
        for records in records_of(config):
            yield records, records.path, partial(read_records, records)
    if isinstance(config, VerifierConfig):
        yield config.verifier, config.verifier.prm_source, partial(read_labelled_steps, config.verifier)


def _first_row(path: str) -> None:
    if next(read_rows(path), None) is None:
        raise UserError(f"{path}: no rows")


def pools_of(config: RunConfig) -> Iterator[object]:
    """Yields the task pools of a run's environments; after a mixture also the pools that it mixes."""
    for one in environments_of(config):
        pool = one.task_pool
        yield pool
        if isinstance(pool, MixturePool):
            yield from pool.sources


def environments_of(config: RunConfig) -> Iterator[EnvironmentSettings]:
    """Yields the settings of the environments that a run trains on and is evaluated on."""
    if isinstance(config, RLConfig):
        yield config.environment
    if isinstance(config, SelfplayConfig):
        yield selfplay_environment(config)
    if isinstance(config, SupervisedConfig | RLConfig):
        tables = config.eval if isinstance(config, RLConfig) else config.probes.values()
        yield from (probe.environment for probe in tables if probe.environment is not None)


def _on_hub(name: str) -> bool:
    """Returns whether a name is a model or data set of the hub rather than a path, by the same rule as `resolve_checkpoint`."""
    path = Path(_plain(name))
    return len(path.parts) == 2 and not path.exists() and not path.parent.exists() and not maker_of(path)


def _plain(name: str) -> str:
    """Removes the slice from a data set's name: "someone/sums@[:100]" becomes "someone/sums"."""
    return name.partition("@[")[0]


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _uncached(names: list[str], kind: str) -> dict[str, str]:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    return {name: name for name in map(_plain, names) if not (folder / f"{kind}s--{name.replace('/', '--')}").is_dir()}


def _incomplete(names: list[str], needs_tokenizer: bool) -> dict[str, str]:
    """Returns the models that are only partly in the cache, each with a text that names the missing files."""
    from huggingface_hub import constants

    found = {}
    for name in names:
        folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
        if not folder.is_dir():
            continue
        ref = folder / "refs" / "main"
        snapshot = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else "")
        lacking = [] if (snapshot / "config.json").is_file() else ["config.json"]
        if lost := _lost_weights(snapshot):
            lacking.append(lost)
        if needs_tokenizer and not any((snapshot / file).is_file() for file in ("tokenizer.json", "tiktoken.model")):
            lacking.append("tokenizer.json")
        if lacking:
            found[name] = f"{name} (without {', '.join(lacking)}; `hf download {name}` fetches it)"
    return found


def _lost_weights(snapshot: Path) -> str:
    """Returns the name of the first missing weight file of a cached model; "" if all files in its index exist."""
    if (snapshot / SINGLE).is_file():
        return ""
    if not (snapshot / INDEX).is_file():
        return SINGLE
    try:
        named = sorted(set(json_of((snapshot / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"a readable {INDEX}"
    return next((file for file in named if not (snapshot / file).is_file()), "")


def sinks(section: SinksSection) -> Check:
    """Checks the experiment trackers (sinks) of a run, and names the hosts that its metrics are sent to.

    Raises UserError if a tracker's package is missing, with the command to install it, and if trackio would send
    metrics to another machine without being asked to.
    """
    name = "sinks"
    if not section.to:
        return Check(name, "ok", "none but metrics.jsonl")
    refuse_unready(section)
    said = ", ".join(section.to)
    online = "wandb" in section.to and section.wandb_mode == "online"
    if online and not _has_wandb_key():
        remedy = 'run: wandb login, or set sinks.wandb_mode = "offline"'
        return Check(name, "fail", f"{said}: W&B has no key here, and would lose every step; {remedy}")
    leaves = [f"W&B at {_wandb_host()}"] * online + trackio_remotes(section)
    return Check(name, "ok", f"{said}; metrics leave this machine for {', '.join(leaves)}" if leaves else said)


def _wandb_host() -> str | None:
    return urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname


def _has_wandb_key() -> bool:
    """Returns whether Weights & Biases finds an API key: in WANDB_API_KEY, or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    host = _wandb_host()
    try:
        return host is not None and host in netrc.netrc(file).hosts
    except (OSError, netrc.NetrcParseError):
        return False
