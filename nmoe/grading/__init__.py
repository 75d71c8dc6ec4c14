"""Graders: total functions from what a policy wrote to a grade. No input makes them raise, hang or guess."""
