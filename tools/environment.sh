# Sourced by the other shell scripts: an environment with requirements.txt in it. That is the active one, if it is a
# virtual environment, or one of conda's that is not its base; else .venv, which is made if it is missing.
require_python() { # NAME
    if ! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: $1 ($(command -v "$1" || echo "not found")) is not Python 3.11 or newer; install that, or activate an environment that has it" >&2
        exit 2
    fi
}
exactly=
if [ -z "${VIRTUAL_ENV:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" = base ]; then
    if [ ! -f .venv/bin/activate ]; then
        require_python python3
        python3 -m venv .venv
        [ -z "${constraints:-}" ] || exactly="-c $constraints"
    fi
    source .venv/bin/activate
fi
require_python python

# Install a requirements file. pip takes seconds even when nothing is missing, so it runs only if something is, or is
# of a version outside the range; a build for another device (2.13.0+cpu) counts as its version. A script that wants the
# exact versions sets `constraints` to a file of them before it sources this: they hold in a .venv that is made here.
install_requirements() {
    python - "$1" <<'END' || { echo "installing $1" && python -m pip install --quiet --disable-pip-version-check -r "$1" $exactly; }
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    from packaging.requirements import Requirement

    for line in open(sys.argv[1], encoding="utf-8").read().splitlines():
        if line and line[0] not in "#-":
            needed = Requirement(line)
            if not needed.specifier.contains(version(needed.name), prereleases=True):
                sys.exit(1)
except (ImportError, PackageNotFoundError):
    sys.exit(1)
END
}
install_requirements requirements.txt
