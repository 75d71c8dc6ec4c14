"""Typed settings: reads TOML files and overrides, and returns frozen, checked sections or one error with every problem."""
