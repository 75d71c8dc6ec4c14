"""The files of a run: its directory, records, checkpoints, provenance and report."""

PROBLEMS = 4
"""How many problems a report shows, and `nmoe runs samples` by default."""
CHARACTERS = 1500
"""The most characters of a prompt or completion there."""
