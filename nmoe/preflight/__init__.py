"""Checks before a run: examines this machine (`nmoe doctor`), and whether it can run a configuration (`nmoe preflight`)."""
