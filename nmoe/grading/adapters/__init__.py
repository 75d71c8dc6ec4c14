"""The exact-match reward as other trainers take it."""
