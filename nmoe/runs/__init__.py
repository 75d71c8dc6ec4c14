"""The files of a run: its directory, records, checkpoints, provenance and report."""
