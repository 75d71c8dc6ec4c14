"""Reinforcement learning: the training loop (`train.py`) and its parts."""
