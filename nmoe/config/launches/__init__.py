"""Reads launches of other trainers, and writes nmoe's configuration for each (`nmoe config import`)."""
