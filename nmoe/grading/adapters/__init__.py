"""Adapters that offer the exact-match reward to other trainers."""
