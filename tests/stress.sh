#!/usr/bin/env bash
# stress.sh TEST ROUNDS: runs the tests whose names contain TEST, or all, ROUNDS times beside a busy loop for each core, and says which failed how often.
# A test that fails here needs luck.
set -euo pipefail
cd "$(dirname "$0")/.."
filter=${1:+test($1)}
logs=$(mktemp -d)
cargo nextest run --workspace --locked --no-run
loops=()
trap 'kill "${loops[@]}"' EXIT
for _ in $(seq "$(nproc)"); do
    sh -c 'while :; do :; done' &
    loops+=($!)
done
for round in $(seq "$2"); do
    cargo nextest run --workspace --locked --status-level fail --final-status-level fail -E "${filter:-all()}" >"$logs/$round" 2>&1 || true
    echo "round $round: $(grep -E '^ *Summary' "$logs/$round")"
done
failed=$(grep -hoE '^ *(FAIL|TIMEOUT|SIG[A-Z]+) .*' "$logs"/* | sed -E 's/^.*\) +//' | sort | uniq -c || true)
printf '%s\n' "${failed:-nothing failed}" "the output of each round: $logs"
[ -z "$failed" ]
