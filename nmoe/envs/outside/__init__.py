"""Environments of other packages, each in its own interpreter and process.

`process.py` is on the side of nmoe. The other files are run by that interpreter, and import nothing of nmoe.
"""
