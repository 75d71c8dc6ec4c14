"""Rules that watch a run's metrics for known faults of training. A rule depends only on the metrics so far or, if it is about the
machine, on the machine's state; it raises one alert as long as its symptom lasts."""
