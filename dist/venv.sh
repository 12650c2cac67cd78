#!/usr/bin/env bash
# Makes the Python environment that `make dist` builds with, or brings it up to requirements.txt. Prints its folder of programs.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/hostler/dist-venv
installed=$venv/requirements.txt

if ! cmp -s "$here/requirements.txt" "$installed"; then
    python3 -m venv "$venv" || { echo "make dist needs python3 with its venv module on PATH (Debian: python3-venv)" >&2; exit 1; }
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install -r "$here/requirements.txt" >&2
    cp "$here/requirements.txt" "$installed" # last: an interrupted install is begun again
fi
echo "$venv/bin"
