"""The command line: one module per command, imported only when that command is called."""

from saccade.cli.commands import main

__all__ = ["main"]
