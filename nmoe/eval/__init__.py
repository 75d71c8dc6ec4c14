"""Evaluation: how many held-out problems a policy solves, with confidence intervals."""
