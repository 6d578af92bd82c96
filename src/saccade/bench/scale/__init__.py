"""`saccade bench scale`: simulates many replicas in virtual time."""
