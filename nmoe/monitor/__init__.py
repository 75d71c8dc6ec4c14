"""Rules that watch a run: each is a pure function of the metrics so far, and fires once when its symptom lasts."""
