"""What a run leaves behind and goes on from: its directory, records, checkpoints, provenance and report."""
