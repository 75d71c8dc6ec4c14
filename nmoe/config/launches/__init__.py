"""Reads launches of TRL, OpenRLHF, verl and SkyRL, and writes nmoe's configuration for each (`nmoe config import`)."""
