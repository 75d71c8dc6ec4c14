"""Verifiers of solutions and of their steps: how solutions are rendered, training, judging, and a verifier's metrics."""
