"""`saccade bench scale`: many replicas in virtual time."""
