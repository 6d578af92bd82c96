"""`saccade bench serve` and `saccade bench startup`."""
