"""Environments: problems in, graded trajectories out. They know tokens and engines, never the model."""
