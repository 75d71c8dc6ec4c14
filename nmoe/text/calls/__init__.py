"""Reads turns of the assistant while they are sampled: their reasoning, their text, and the tool calls of each family of models."""
