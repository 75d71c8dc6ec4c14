"""Trained verifiers: how solutions are shown to them, what they say of steps and of whole solutions, and how well."""
