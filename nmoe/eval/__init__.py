"""Evaluation: what a policy reaches on held-out problems, and how sure that is."""
