"""The `nmoe` command: one file for each group of verbs, put together in `command`."""

from nmoe.cli.command import main, rl, run

__all__ = ["main", "rl", "run"]
