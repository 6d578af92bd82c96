"""Routes for operators: health, models, metrics, traces, OpenAPI."""
