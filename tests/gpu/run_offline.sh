#!/usr/bin/env bash
# Run the tests on a GPU machine without a network.
#
#   pip wheel --no-deps -w .whl hydra-core omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 accelerate \
#       pytest pytest-xdist execnet pluggy iniconfig packaging setuptools wheel llguidance \
#       jsonschema attrs referencing rpds-py jsonschema-specifications
#                                                                            # where there is a network
#   bash tests/gpu/run_offline.sh [pytest arguments]                         # on the GPU machine
#
# torch and transformers must be there already; whatever wheels .whl holds are installed first. Without arguments: tests/gpu, then everything else.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .whl ]; then
    python3 -m pip install --quiet --no-index --no-deps .whl/*.whl
fi
python3 -m pip install --quiet --no-deps --no-build-isolation -e .
python3 -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__, torch.cuda.get_device_name())'
if [ $# -gt 0 ]; then
    exec python3 -m pytest "$@"
fi
python3 -m pytest tests/gpu
python3 -m pytest tests --ignore tests/gpu
