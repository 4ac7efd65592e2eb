"""The command line of the evaluation harness, in which the model ``specgraph`` is known.

``python -m specgraph.evaluation --model specgraph --model_args pretrained=MODEL,draft=DRAFT --tasks gsm8k``
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> int:
    """Run the harness with the arguments of the command line; 2 if it is not installed, or the model was refused."""
    missing = [name for name in ("lm_eval", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} must be installed: pip install -e '.[eval]'", file=sys.stderr)
        return 2
    from lm_eval.__main__ import cli_evaluate

    import specgraph.evaluation.lm_eval  # noqa: F401  (registers the model)
    from specgraph.errors import SpecgraphError

    try:
        cli_evaluate()
    except SpecgraphError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
