"""The files of a training run: directory, records, checkpoints, provenance and report."""

PROBLEMS = 4
"""The number of problems that a report shows samples of, and the default of `nmoe runs samples`."""
CHARACTERS = 1500
"""The largest number of characters of a prompt or completion that a report shows."""
