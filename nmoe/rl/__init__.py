"""The environment kernel: problems in, graded trajectories out. It knows tokens and engines, never the model."""
