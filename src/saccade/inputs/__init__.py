"""Turns requests into engine inputs: images, videos, chat templates, tokens and positions."""
