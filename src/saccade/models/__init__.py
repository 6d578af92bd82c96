"""Model specs, one decoder and one vision tower for all families, the families' declarations, and weight loading."""
