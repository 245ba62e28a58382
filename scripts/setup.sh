#!/bin/sh
# Builds .venv beside this script's folder: finds a Python, makes the environment, installs the package with the
# pinned versions of constraints.txt. Does nothing when .venv is already what these files ask for.
set -eu

cd "$(dirname "$0")/.."
root=$(pwd)
venv=$root/.venv
stamp=$venv/.installed
# The path is part of the mark, since an environment that was moved has scripts that point nowhere.
wanted=$( (pwd; cat pyproject.toml constraints.txt scripts/setup.sh) | cksum)

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

whole() { [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }

# step TEXT COMMAND...: runs the command and says how long it took; its output is shown only if it fails.
step() {
    text=$1
    shift
    printf 'setup: %s ... ' "$text"
    started=$(date +%s)
    if "$@" >"$log" 2>&1; then
        echo "$(($(date +%s) - started)) s"
    else
        echo failed
        return 1
    fi
}

fits() { "$1" -c 'import ensurepip, ssl, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# Prints the path of the first Python that is new enough: on PATH, then pyenv's inactive ones, then uv's.
find_python() {
    for name in python3.12 python3.13 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
        if fits "$name"; then
            # The one behind a shim or an activated environment, which may be the very .venv to be replaced.
            "$name" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    found=$(uv python find --system '>=3.12' 2>/dev/null) && fits "$found" && echo "$found"
}

install_with_uv() {
    uv --version >/dev/null 2>&1 || return 1
    step "making .venv with uv" uv venv --quiet --python "$python" "$venv" &&
        step "installing packages with uv" uv pip install --python "$venv/bin/python" -c constraints.txt -e '.[dev]'
}

install_with_pip() {
    step "making .venv" "$python" -m venv "$venv" &&
        step "installing packages with pip (a minute or two)" \
            "$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
}

whole && exit 0

python=$(find_python) || fail "no Python of 3.12 or newer found (looked for python3.12, python3.13, python3, pyenv's versions and uv's); install one, for example with 'apt install python3.12-venv' or 'uv python install 3.12'"

mkdir -p .cache
log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'exit 130' INT TERM HUP

# One set-up at a time. The lock belongs to this shell's open file, so it ends with the shell, however that ends.
exec 9>.cache/setup.lock
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
    say "waiting for another set-up of this folder to end"
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}
whole && exit 0

# Without a mark, .venv was left half built. The mark is written last.
rm -rf "$venv"
began=$(date +%s)
say "using $python ($("$python" -V))"
if ! install_with_uv; then
    rm -rf "$venv"
    install_with_pip || {
        tail -n 25 "$log" >&2
        fail "the installation failed; its last lines are above. Fix the cause and run it again: it starts anew"
    }
fi
echo "$wanted" >"$stamp"
say ".venv is ready ($(($(date +%s) - began)) s)"
