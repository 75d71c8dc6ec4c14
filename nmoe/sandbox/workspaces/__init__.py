"""Workspaces, the files that trajectories start with: prepared once, copied for each trajectory, and kept or removed by one
policy."""
