"""The server's web page."""
