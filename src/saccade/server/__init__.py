"""The HTTP server: OpenAI's API in front of the engine's process."""
