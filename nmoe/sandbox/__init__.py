"""Sandboxes: where everything that a policy wrote runs (docs/guides/sandbox.md)."""
