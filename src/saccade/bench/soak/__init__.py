"""`saccade bench soak`."""
