"""How much of a run's samples is shown. Apart from `samples.py`, so that the command line starts without what that imports."""

PROBLEMS = 4
"""How many problems a report shows, and `nmoe runs samples` by default."""
CHARACTERS = 1500
"""The most characters of a prompt or completion there."""
