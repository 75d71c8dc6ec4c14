"""The files that trajectories start with: prepared once, copied for each, and kept or removed by one policy."""
