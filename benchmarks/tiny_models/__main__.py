"""Train a small target and its draft: ``python examples/train_tiny.py data=questions.jsonl [key=value ...]``.

Keys are those of ``specgraph.training.config.TrainConfig``, for example ``draft.optim.steps=2000``.
"""

import sys

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specgraph.errors import SpecgraphError
from specgraph.training import TrainConfig, TrainReport, run_training


def main(overrides: list[str]) -> TrainReport:
    """Train with ``key=value`` overrides of the defaults and print the report."""
    cfg = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.from_dotlist(overrides))
    report = run_training(OmegaConf.to_object(cfg))
    print(report)
    return report


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (SpecgraphError, OmegaConfBaseException) as error:
        sys.exit(f"train_tiny: {str(error).splitlines()[0]}")
