#!/usr/bin/env bash
# Makes .venv with everything that `make demo` and `make test` need, at the versions of constraints.txt.
# Needs no root. Run again it sees by a stamp that nothing changed and ends at once.
#
#   PYTHON=python3.12            which Python to use (3.10, 3.11 or 3.12)
#   SHOAL_MIN_FREE_MB=3000       free disk space that it asks for before it installs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.shoal-stamp
log=$venv/setup.log
min_free_mb=${SHOAL_MIN_FREE_MB:-3000}
fish_speech="fish-speech==0.1.0 fish-speech-lib==0.1.1.1"

die() {
    echo "set-up: $*" >&2
    exit 1
}

version_of() { # the version of a Python, empty where it does not start
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true
}

supported() { [[ $1 =~ ^3\.(10|11|12)\. ]]; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        supported "$(version_of "$PYTHON")" ||
            die "PYTHON=$PYTHON is '$(version_of "$PYTHON")': name a Python 3.10, 3.11 or 3.12, such as PYTHON=python3.11"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.10 python; do
        if supported "$(version_of "$candidate")"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.10, 3.11 or 3.12 found: install one (Debian, Ubuntu: apt install python3 python3-venv) or set PYTHON=/path/to/python"
}

# What the environment was made from; a change of any of it means installing again.
key() { # $1: the Python's version
    echo "$1 $PWD $(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)"
}

python=$(find_python) || exit 1
python_version=$(version_of "$python")
wanted=$(key "$python_version")
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi

free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
if ((free_mb < min_free_mb)); then
    die "the disk is nearly full: $free_mb MB free in $PWD, set-up needs $min_free_mb MB; free some space or work on another disk"
fi
if [[ $(version_of $venv/bin/python) != "$python_version" ]] || ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module: install it (Debian, Ubuntu: apt install python3-venv) or set PYTHON to another Python"
    rm -rf $venv
    "$python" -m venv $venv || die "$python -m venv failed: see above"
fi
rm -f "$stamp"

echo "set-up: installing into $venv, some minutes the first time (log: $log)"
: >"$log"
pip() {
    if ! $venv/bin/python -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1; then
        if grep -q "No space left on device" "$log"; then
            die "the disk filled up while installing: free some space, or set TMPDIR to a directory with room (log: $log)"
        elif grep -qE "NewConnectionError|NameResolutionError|Temporary failure in name resolution|Read timed out" "$log"; then
            die "the package index cannot be reached: check the network, or name a mirror with PIP_INDEX_URL (log: $log)"
        fi
        die "pip failed: $(grep -E '^ *ERROR' "$log" | head -n 1 | cut -c -300) (log: $log)"
    fi
}
begin=$SECONDS
pip -c constraints.txt setuptools wheel
# No build isolation: the package is built by the pinned setuptools, not by whichever is newest that day.
pip -c constraints.txt --no-build-isolation -e ".[serve,notebooks,baseline,test]"
# shellcheck disable=SC2086 # two words
pip --no-deps $fish_speech
echo "$wanted" >"$stamp"
echo "set-up: done in $((SECONDS - begin)) s"
