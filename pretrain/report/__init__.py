"""What a run tells: loggers, metrics, progress, slow ranks, evaluations beside it."""
