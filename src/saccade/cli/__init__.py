"""The command line: one module a command, each imported only when its command is called."""

from saccade.cli.commands import main

__all__ = ["main"]
