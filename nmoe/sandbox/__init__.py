"""Sandboxes, in which all code that a policy wrote runs (docs/guides/sandbox.md)."""
