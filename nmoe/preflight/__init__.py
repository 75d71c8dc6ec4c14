"""Checks before a run starts: what this machine offers, and whether it can run a configuration."""
