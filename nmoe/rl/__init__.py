"""Reinforcement learning: the training loop and its parts, one step after the other in `train.py`."""
