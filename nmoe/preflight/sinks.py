"""Whether the sinks that a run names have their packages and credentials."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from nmoe.config.tables.sinks import SinksSection
from nmoe.preflight.check import Check
from nmoe.runs.sinks.sinks import refuse_without_packages


def sinks(section: SinksSection) -> Check:
    """The sinks by name. Raises UserError, with the command that installs it, for a package that is missing."""
    name = "sinks"
    if not section.to:
        return Check(name, "ok", "none but metrics.jsonl")
    refuse_without_packages(section.to)
    said = ", ".join(section.to)
    if "wandb" in section.to and section.wandb_mode == "online" and not _has_wandb_key():
        return Check(
            name, "warn", f'{said}: W&B has no key here; run: wandb login, or set sinks.wandb_mode = "offline"'
        )
    return Check(name, "ok", said)


def _has_wandb_key() -> bool:
    """Whether W&B finds a key: in WANDB_API_KEY, or for its host in the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return host is not None and host in netrc.netrc(file).hosts
    except (OSError, netrc.NetrcParseError):
        return False
