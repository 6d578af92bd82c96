"""Connections: HTTP/1.1 with limits, TLS, keys and origins, bodies as JSON, server-sent events."""
