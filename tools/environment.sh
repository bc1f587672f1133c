# Sourced by the other shell scripts: an environment with requirements.txt in it. That is the active one, if it is a
# virtual environment, or one of conda's that is not its base; else .venv, which is made if it is missing.
require_python() { # NAME
    if ! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: $1 ($(command -v "$1" || echo "not found")) is not Python 3.11 or newer; install that, or activate an environment that has it" >&2
        exit 2
    fi
}
if [ -z "${VIRTUAL_ENV:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" = base ]; then
    if [ ! -f .venv/bin/activate ]; then
        require_python python3
        python3 -m venv .venv
    fi
    source .venv/bin/activate
fi
require_python python

# Install a requirements file. pip takes seconds even when nothing is missing, so it runs only if a pin is not met; a
# build of the pinned version for another device (2.13.0+cpu) meets it. This project itself is not installed: every
# script runs the code that it lies beside.
install_requirements() {
    python - "$1" <<'END' || { echo "installing $1" && python -m pip install --quiet --disable-pip-version-check -r "$1"; }
import sys
from importlib.metadata import PackageNotFoundError, version

pins = [line.split("==") for line in open(sys.argv[1], encoding="utf-8").read().splitlines() if "==" in line]
try:
    sys.exit(any(version(name).split("+")[0] != pin for name, pin in pins))
except PackageNotFoundError:
    sys.exit(1)
END
}
install_requirements requirements.txt
