#!/usr/bin/env bash
# The tests: installs what they need, then runs ruff, the type checker and pytest, two tests at a time on a thread each.
# Arguments go to pytest: bash scripts/test.sh -k loop; --slow adds those that take minutes and more combinations.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
requirements=(requirements.txt requirements-test.txt)
source tools/environment.sh
[ "$(id -u)" != 0 ] || bash tools/install_chromium.sh
ruff check .
ruff format --check .
pyrefly check
# What asks whether the CPU has bfloat16 arithmetic, once more as on one that lacks it: these x86 instruction sets only.
[ $# != 0 ] || ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m pytest \
    tests/trainer/{devices/test_device,optim/test_build}.py -k "bfloat16 or muon"
python -m pytest -n 2 --dist worksteal "$@"
