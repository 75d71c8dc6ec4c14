"""Sandboxes: where everything that a policy wrote runs (docs/sandbox.md)."""
