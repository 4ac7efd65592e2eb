#!/usr/bin/env bash
# Run the tests on a GPU machine without a network.
#
#   pip wheel --no-deps -w .whl hydra-core omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 accelerate \
#       pytest pytest-xdist execnet pluggy iniconfig packaging setuptools wheel llguidance \
#       jsonschema attrs referencing rpds-py jsonschema-specifications
#                                                                            # where there is a network
#   bash tests/gpu/run_offline.sh --list                                     # the pieces, and when they last ran
#   bash tests/gpu/run_offline.sh --piece NAME... --commit COMMIT [--table FILE]   # some of them, or all
#   bash tests/gpu/run_offline.sh [pytest arguments]                         # anything else
#
# torch and transformers must be there already; whatever wheels .whl holds are installed first. A piece takes less than ten
# minutes. Its row goes into docs/gpu-tests.md, or into FILE if only that comes back from the machine. --commit says what
# is tested where there is no git to ask. Without arguments: all pieces, then all other tests.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -d .whl ]; then
    python3 -m pip install --quiet --no-index --no-deps .whl/*.whl
fi
python3 -m pip install --quiet --no-deps --no-build-isolation -e .
python3 -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
case "${1-}" in
--list | --piece | --commit | --table | --limit) exec python3 -m tests.gpu.pieces "$@" ;;
?*) exec python3 -m pytest "$@" ;;
esac
python3 -m tests.gpu.pieces --piece all
python3 -m pytest tests --ignore tests/gpu
