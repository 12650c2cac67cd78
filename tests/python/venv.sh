#!/usr/bin/env bash
# Makes the Python environment of these suites, or brings it up to the requirements; does nothing when it is
# already right. Prints the path of its interpreter, so that a caller can say: $(tests/python/venv.sh) -m pytest
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/hostler/sdk-venv
installed=$venv/requirements.txt

if ! cat "$here"/requirements*.txt | cmp -s - "$installed"; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "these suites need python3, 3.11 or newer, on PATH" >&2; exit 1; }
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install -r "$here/requirements.txt" >&2
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps -r "$here/requirements-no-deps.txt" >&2
    cat "$here"/requirements*.txt > "$installed" # last: an interrupted install is begun again
fi
echo "$venv/bin/python"
