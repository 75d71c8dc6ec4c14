"""Environments of other packages, each in an interpreter and a process of its own.

`process.py` is on the side of nmoe. The other files are run by that interpreter, and import nothing of nmoe.
"""
