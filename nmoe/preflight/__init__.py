"""What is known before anything runs: what this machine offers, and whether a configuration can do what it says."""
