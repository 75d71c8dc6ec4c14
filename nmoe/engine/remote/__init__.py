"""Engines in other processes, as seen from this one."""
