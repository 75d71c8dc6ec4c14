"""Evaluation: measures the share of held-out problems that a model solves, with confidence intervals."""
