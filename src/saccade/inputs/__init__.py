"""From a request to what the engine takes: images, videos, chat templates, tokens, positions."""
