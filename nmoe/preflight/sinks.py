"""Whether the sinks that a run names have their packages and credentials."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from nmoe.config.tables.run import SinksSection
from nmoe.preflight.check import Check
from nmoe.runs.sinks.sinks import refuse_unready, trackio_remotes


def sinks(section: SinksSection) -> Check:
    """The sinks by name, and where metrics leave the machine. Raises UserError, with the command that installs it, for a package
    that is missing, and for a trackio that would send metrics elsewhere unasked."""
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
    """Whether W&B finds a key: in WANDB_API_KEY, or for its host in the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    host = _wandb_host()
    try:
        return host is not None and host in netrc.netrc(file).hosts
    except (OSError, netrc.NetrcParseError):
        return False
