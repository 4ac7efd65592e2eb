"""Runs the command line: ``python -m specgraph``."""

import sys

from specgraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
