"""Rules that watch a run's metrics for known faults of training. A rule depends only on the metrics so far, and raises
one alert."""
