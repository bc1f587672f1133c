# Sourced by the other shell scripts: a virtual environment (.venv, unless one is active) with requirements.txt in it.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $(python3 --version) is too old; install Python 3.11 or newer" >&2
        exit 2
    fi
    [ -f .venv/bin/activate ] || python3 -m venv .venv
    source .venv/bin/activate
fi

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
