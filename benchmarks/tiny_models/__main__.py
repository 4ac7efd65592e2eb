"""Train a small target and its draft:  python -m benchmarks.tiny_models data=questions.jsonl [KEY=VALUE ...]

Keys are those of :class:`benchmarks.tiny_models.config.TrainConfig`, for example ``draft.optim.steps=2000``.
"""

import sys

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.tiny_models.config import TrainConfig
from benchmarks.tiny_models.run import TrainReport, run_training
from specgraph.errors import SpecgraphError


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
        sys.exit(f"tiny_models: {str(error).splitlines()[0]}")
