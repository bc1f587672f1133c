#!/usr/bin/env bash
# Tests on this machine's GPUs what the manual guarantees, in less than 15 minutes; without a GPU what a CPU can, in five.
#
#   bash scripts/gpu_check.sh                          everything; writes out/gpu_check.json, to send in
#   bash scripts/gpu_check.sh --only losses,attention  some checks
#   bash scripts/gpu_check.sh --list                   what there is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
exec python scripts/gpu_check.py "$@"
