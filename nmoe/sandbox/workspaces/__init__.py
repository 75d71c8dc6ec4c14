"""The files that trajectories start with: prepared once, copied for each, kept or collected by one policy."""
