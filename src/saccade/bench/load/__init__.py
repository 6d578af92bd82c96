"""Requests, the client that sends them, and servers to send them to."""
