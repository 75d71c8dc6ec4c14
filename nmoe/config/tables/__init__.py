"""The tables of configurations, by topic: every key with its meaning, default and limits."""
