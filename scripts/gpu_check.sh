#!/usr/bin/env bash
# Tests the guarantees of the manual on this machine's GPUs; without a GPU those that a CPU can check.
#
#   bash scripts/gpu_check.sh                              everything; ends with a table to send in
#   bash scripts/gpu_check.sh --seconds 480                what fits into eight minutes, what tells most first
#   bash scripts/gpu_check.sh -k "losses or attention"     some checks: other arguments choose, as with pytest
#   bash scripts/gpu_check.sh --collect-only               what there is
#
# It takes the python3 on the path if that has all that the checks import, with or without a network; else the
# environment that the other scripts use, and installs there what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
has_all() { # PYTHON
    "$1" - 2>/dev/null <<'END'
import sys
from importlib.util import find_spec

needed = "torch transformers numpy pydantic yaml jinja2 pyarrow psutil tqdm safetensors pytest xdist hypothesis"
sys.exit(sys.version_info < (3, 11) or not all(map(find_spec, needed.split())))
END
}
for python in python python3; do
    if has_all "$python"; then
        exec "$python" -m tests.gpu.run_checks "$@"
    fi
done
requirements=(requirements.txt requirements-test.txt)
source tools/environment.sh
exec python -m tests.gpu.run_checks "$@"
