"""Verification of code: tests and solution run in separate processes that exchange plain data (docs/guides/sandbox.md)."""
