"""Verification of code: tests run in one process, the solution in another, and plain data between them (docs/guides/sandbox.md)."""
