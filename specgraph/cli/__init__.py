"""The command line: its configurations, its commands, and what they print."""

from specgraph.cli.entry import main

__all__ = ["main"]
