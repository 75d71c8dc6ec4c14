"""Rules that watch a run's metrics. A rule depends only on the metrics so far, and fires once when its symptom lasts."""
