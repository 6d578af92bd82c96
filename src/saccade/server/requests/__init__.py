"""From a body to a job for the engine."""
