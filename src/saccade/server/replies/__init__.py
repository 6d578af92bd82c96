"""From the engine's outputs to a reply, whole or streamed."""
