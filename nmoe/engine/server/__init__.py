"""The native engine behind HTTP: `python -m nmoe.engine.server CHECKPOINT`."""
