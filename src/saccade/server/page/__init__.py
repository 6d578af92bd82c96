"""The page that the server shows, and its files."""
