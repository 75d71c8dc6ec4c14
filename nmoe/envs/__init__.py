"""Environments turn problems into graded trajectories. They know tokens and the engine protocol, never the model."""
