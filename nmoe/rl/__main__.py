"""Runs the verbs of `nmoe rl` as `python -m nmoe.rl`, the documented module name."""

from nmoe.cli import rl, run

if __name__ == "__main__":
    run(rl, "python -m nmoe.rl")
