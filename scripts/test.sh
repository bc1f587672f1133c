#!/usr/bin/env bash
# The tests: installs what they need, then runs ruff and pytest. Arguments go to pytest: bash scripts/test.sh -k loop
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
pip install --quiet --disable-pip-version-check -e ".[test]"
ruff check .
ruff format --check .
python -m pytest "$@"
