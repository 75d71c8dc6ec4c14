"""Verifiers of steps and of whole solutions: how solutions are shown to them, training, judging, and how good they are."""
