"""The `nmoe` command line: one file for each group of commands; `command` assembles them."""

from nmoe.cli.command import main, rl, run

__all__ = ["main", "rl", "run"]
