"""Sinks, which receive a run's metrics in addition to metrics.jsonl: CSV, TensorBoard, Weights & Biases, trackio.

Each is off unless `[sinks] to` names it. A sink gets only records that are in the ledger, and the run never waits for one.
"""
