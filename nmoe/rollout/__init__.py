"""Rollouts: problems in, graded groups of trajectories out; what they were, kept so that it can be replayed."""
