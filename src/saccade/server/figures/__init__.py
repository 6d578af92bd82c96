"""What the front end measures: metrics, spans, load, traces."""
