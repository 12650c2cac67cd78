#!/usr/bin/env bash
# Makes the Python environment that schemathesis lives in, or brings it up to requirements.txt. Prints the path of its `st`.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/hostler/hardening-venv
installed=$venv/requirements.txt

if ! cmp -s "$here/requirements.txt" "$installed"; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "this suite needs python3, 3.11 or newer, on PATH" >&2; exit 1; }
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install -r "$here/requirements.txt" >&2
    cp "$here/requirements.txt" "$installed" # last: an interrupted install is begun again
fi
echo "$venv/bin/st"
