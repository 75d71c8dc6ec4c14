"""Sandboxes: everything that a policy wrote runs in one (docs/guides/sandbox.md)."""
