"""What this machine offers, before anything runs on it."""
