"""Connections: HTTP/1.1 with limits, TLS, keys and origins, JSON bodies, server-sent events."""
