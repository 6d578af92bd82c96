"""From what the engine sends to a reply, whole or streamed."""
