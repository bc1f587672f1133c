#!/usr/bin/env bash
# Tests the guarantees of the manual on this machine's GPUs; without a GPU those that a CPU can check.
#
#   bash scripts/gpu_check.sh                              everything; ends with a table to send in
#   bash scripts/gpu_check.sh -k "losses or attention"     some checks: arguments choose, as with pytest
#   bash scripts/gpu_check.sh --collect-only               what there is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
requirements=(requirements.txt requirements-test.txt)
source tools/environment.sh
exec python -m tests.gpu.run_checks "$@"
