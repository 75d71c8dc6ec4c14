"""The processes of a run on one machine or many."""
