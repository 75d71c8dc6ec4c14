"""`python -m nmoe`: the `nmoe` command."""

from nmoe.cli import main

if __name__ == "__main__":
    main()
