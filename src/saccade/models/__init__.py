"""Model specs, the decoder and the vision tower that all families share, family declarations, and weight loading."""
