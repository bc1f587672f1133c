# Sourced by the other shell scripts: puts a Python that has the packages of requirements.txt in front.
#
# The active one (a virtual environment, conda's, the system's) is taken as it is if it has them in versions that
# requirements.txt allows; nothing is ever installed into it. Else it is .venv, which belongs to this folder: it is made
# if there is none, what it lacks is installed in the versions of requirements-lock.txt, and what it has stays.
#
# A script that needs more sets requirements=(FILE ...) before. Afterwards `activate_first` says what a new shell needs.
requirements=("${requirements[@]:-requirements.txt}")
own="$PWD/.venv/bin/python"
activate_first=""
active="$(command -v python || command -v python3 || echo python3)"

missing_packages() { # PYTHON
    "$1" tools/missing_packages.py "${requirements[@]}"
}

is_new_enough() { # PYTHON
    "$1" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null
}

end_unless_new_enough() { # PYTHON ADVICE
    is_new_enough "$1" || {
        echo "error: $1 is not Python 3.11 or newer; $2" >&2
        exit 2
    }
}

take_own_environment() {
    # no array may be empty where it is expanded: to the bash of macOS, 3.2, it is an unbound variable
    local base="$(command -v python3 || echo python3)" create=(-m venv) install missing
    if [ ! -x "$own" ]; then
        end_unless_new_enough "$base" "install that, or activate an environment that has it"
        missing="$(missing_packages "$base")"
        [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] ||
            echo "the active environment lacks" $missing "and stays as it is: .venv is used instead"
        # A torch that came with the machine, for its GPU, is used from .venv, too.
        [[ -n "${VIRTUAL_ENV:-}" || "$missing" == *torch[=\>]* ]] || create+=(--system-site-packages)
        "$base" "${create[@]}" .venv
    fi
    end_unless_new_enough "$own" "remove .venv, which is then made anew"
    activate_first=" (in this shell first: source .venv/bin/activate)"
    export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"
    missing="$(missing_packages "$own")"
    [ -n "$missing" ] || return 0
    echo "installing into .venv:" $missing
    # An environment that uv made has no pip.
    "$own" -m pip --version >/dev/null 2>&1 || "$own" -m ensurepip >/dev/null
    install=(-m pip install --quiet --disable-pip-version-check $missing)
    # What packages need in turn has its locked version, too, unless a torch that is there asks for another.
    [[ "$missing" != *torch[=\>]* ]] || install+=(-c requirements-lock.txt)
    "$own" "${install[@]}"
}

if [ "$active" = "$own" ] || [[ -x "$own" && -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]]; then
    take_own_environment
elif ! is_new_enough "$active" || ! missing="$(missing_packages "$active" 2>/dev/null)" || [ -n "$missing" ]; then
    take_own_environment
fi
