# Sourced by the other shell scripts: a virtual environment (.venv, unless one is active) with requirements.txt in it.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $(python3 --version) is too old; install Python 3.11 or newer" >&2
        exit 2
    fi
    [ -f .venv/bin/activate ] || python3 -m venv .venv
    source .venv/bin/activate
fi
# Waiting CPU threads sleep early instead of spinning: several times faster on cores shared with other work, a few
# percent slower on idle ones (docs/LOG.md).
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-2000}"
# pip takes seconds even when nothing is missing: run it only if the requirements or the clone have changed.
installed="$(python -c 'import sys; print(sys.prefix)')/minimind_requirements.txt"
if [ "$(cat requirements.txt; pwd)" != "$(cat "$installed" 2>/dev/null)" ]; then
    echo "installing requirements.txt"
    python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    { cat requirements.txt; pwd; } >"$installed"
fi
