"""Graders: total functions from an answer to a grade. No input makes them raise, hang or guess."""
