"""The referee: checks that find the faults of a rollout server, from outside."""
