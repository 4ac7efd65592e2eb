"""The command line."""

from specgraph.cli.entry import main

__all__ = ["main"]
