"""Runs the `nmoe` command as `python -m nmoe`."""

from nmoe.cli import main

if __name__ == "__main__":
    main()
