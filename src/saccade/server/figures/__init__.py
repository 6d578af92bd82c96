"""Figures of the front end: metrics, spans, load, traces."""
