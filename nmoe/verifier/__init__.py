"""Verifiers of steps and of whole solutions: rendering, training, judging, and metrics of a verifier."""
