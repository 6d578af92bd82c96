"""Runs work on untrusted data in processes that can be killed: decoding media, trying grammars."""
