"""Rollouts turn problems into graded groups of trajectories and record them so that they can be replayed."""
