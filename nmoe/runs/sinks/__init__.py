"""Sinks for a run's metrics besides metrics.jsonl: CSV, TensorBoard, Weights & Biases, trackio.

Each is off unless `[sinks] to` names it. A sink reads nothing that is not in the ledger, and the run never waits for one.
"""
