#!/usr/bin/env bash
# changed.sh [BASE]: a nextest filter of the crates whose files differ from BASE, of all that depends on them, and of a smoke test of the whole system.
# BASE is origin/main where there is one, else the last commit.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-$(git rev-parse --quiet --verify origin/main || git rev-parse HEAD)}
filter="test(/^(failover|resumption)::/)"
while read -r folder; do
    manifest=$(printf '%s\n' "$folder/Cargo.toml" "${folder%%/*}/Cargo.toml" | while read -r file; do [ ! -f "$file" ] || echo "$file"; done | head -n 1)
    [ -z "$manifest" ] || filter+=" or rdeps($(sed -n 's/^name = "\(.*\)"/\1/p' "$manifest" | head -n 1))"
done < <({ git diff --name-only "$base"; git ls-files --others --exclude-standard; } | sed -n 's|^\(tests/[^/]*\)/.*|\1|p; t; s|^\([^/]*\)/.*|\1|p' | sort -u)
# What is no crate's concerns all of them.
[ -z "$(git diff --name-only "$base" -- Cargo.toml Cargo.lock .config)" ] || filter="all()"
echo "$filter"
