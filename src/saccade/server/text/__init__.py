"""Reasoning and tool calls in a model's text."""
