"""The command line: its configurations, its commands, and what they print."""

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code; see :func:`specgraph.cli.entry.main`.

    ``doctor`` runs even where a package is missing that all other commands need.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the program that reads the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["doctor"]:
        from specgraph.cli.doctor import doctor

        return doctor(arguments[1:])
    try:
        from specgraph.cli import entry
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is missing; python -m specgraph doctor says what to do.", file=sys.stderr)
        return 2
    return entry.main(arguments)


__all__ = ["main"]
