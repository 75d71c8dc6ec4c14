"""The `nmoe` command: one file per verb, put together in `command`."""

from nmoe.cli.command import main, rl, run

__all__ = ["main", "rl", "run"]
