"""The load of a benchmark: its requests, the client that sends them, and a server to send them to."""
