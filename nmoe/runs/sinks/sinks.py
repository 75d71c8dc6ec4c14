"""All sinks of a run: opened at its start, told of each step and alert, and asked at its end what they lost."""

import os
import time
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nmoe.config.tables.run import SinksSection
from nmoe.errors import UserError
from nmoe.extras import how_to_install
from nmoe.runs.sinks.feed import Feed
from nmoe.runs.sinks.sink import Attempt, Sink, scalars_of

# Module and class by name; the package that one needs, and the extra with it, has the sink's name. CSV needs none.
_SINKS = {
    "csv": ("nmoe.runs.sinks.csv_file", "CsvSink"),
    "tensorboard": ("nmoe.runs.sinks.tensorboard", "TensorBoardSink"),
    "wandb": ("nmoe.runs.sinks.wandb", "WandbSink"),
    "trackio": ("nmoe.runs.sinks.trackio", "TrackioSink"),
}
# How long the end of a run waits for its sinks, all of them together: an upload takes a while.
CLOSE_SECONDS = 60.0


# With these trackio does not keep to its local database: a Space, a server, and a hook for alerts.
_TRACKIO_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


def refuse_unready(section: SinksSection) -> None:
    """Raises UserError, with the remedy, for a sink whose package is missing, or that would send metrics somewhere that the
    configuration does not agree to."""
    refuse_without_packages(section.to)
    named = trackio_remotes(section)
    if named and not section.trackio_remote:
        raise UserError(
            f"[sinks] to: trackio would send metrics off this machine, as {', '.join(named)} in the environment asks; unset it, or "
            "agree by sinks.trackio_remote = true"
        )


def trackio_remotes(section: SinksSection) -> list[str]:
    """The variables of the environment by which trackio, if it is a sink, sends metrics or alerts elsewhere."""
    return [name for name in _TRACKIO_REMOTE if os.environ.get(name)] if "trackio" in section.to else []


def refuse_without_packages(names: Collection[str]) -> None:
    """Raises UserError, with the command that installs them, where sinks need packages that are not installed."""
    missing = [name for name in names if name != "csv" and not _is_installed(name)]
    if missing:
        raise UserError(
            f"[sinks] to: {', '.join(missing)}: not installed; run: {how_to_install(*missing)}, or leave it out"
        )


class Sinks:
    """The sinks of one attempt. No call waits for a sink but `close`, and none raises because of one."""

    def __init__(self, names: Collection[str], attempt: Attempt, close_seconds: float = CLOSE_SECONDS) -> None:
        self._close_seconds = close_seconds
        self._feeds = [Feed(name, _connector(name, attempt)) for name in names]

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Passes on the numbers of a step."""
        scalars = scalars_of(metrics)
        for feed in self._feeds:
            feed.offer(lambda sink: sink.write(step, scalars))

    def alert(self, step: int, message: str) -> None:
        """Passes on an alert."""
        for feed in self._feeds:
            feed.offer(lambda sink: sink.alert(step, message))

    def close(self) -> list[str]:
        """Waits until all is written, or for `close_seconds`. Returns one line for each sink that lost something."""
        for feed in self._feeds:
            feed.close()
        end = time.monotonic() + self._close_seconds
        for feed in self._feeds:
            feed.join(max(0.0, end - time.monotonic()))
        return [trouble for feed in self._feeds if (trouble := feed.trouble()) is not None]


def _is_installed(package: str) -> bool:
    """False for a mere folder of that name too, such as the one that W&B makes where it runs."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _connector(name: str, attempt: Attempt) -> Callable[[], Sink]:
    """Imports the sink's module, and with it the package, only where the sink is wanted."""
    module, kind = _SINKS[name]
    return lambda: getattr(import_module(module), kind)(attempt)
