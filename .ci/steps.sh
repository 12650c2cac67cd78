# What .ci/run and .ci/full share; sourced at the root of the repository. Steps run once each, and the end says what each runner said of itself.
set -euo pipefail
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 NEXTEST_PROFILE=ci
# Built once, with what the tests need of each crate; make builds no other one where this is set.
export HOSTLER_BIN="$PWD/target/debug/hostler"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/hostler"
# All clones of this machine share what the crates of others compile to, one run at a time. Cargo would
# take one clone's own crates for those of another (rust-lang/cargo#12516), so a clone that was not the
# last one here compiles its own anew.
export CARGO_BUILD_BUILD_DIR="$cache/build"
mkdir -p "$CARGO_BUILD_BUILD_DIR"
[ -n "${HOSTLER_CI_LOCKED:-}" ] || HOSTLER_CI_LOCKED=1 exec flock --close --timeout 7200 "$cache/build.lock" "$PWD/.ci/${0##*/}" "$@"
[ "$(cat "$CARGO_BUILD_BUILD_DIR/clone" 2>/dev/null)" = "$PWD" ] || find "$CARGO_BUILD_BUILD_DIR" -path '*/.fingerprint/hostler*' -delete
echo "$PWD" >"$CARGO_BUILD_BUILD_DIR/clone"
logs="$PWD/target/ci"
mkdir -p "$logs"

# Lines by which runners sum up: nextest, pytest, node, netns and hardening, chaos; else the last one counts.
sums='^ *Summary \[|^=+ .* in [0-9.]+s|^(ℹ|#) (pass|fail|skipped) |[0-9]+ passed, [0-9]+ failed|[0-9]+ of [0-9]+ as expected'

# Set where steps run beside others: then a step's output goes to its log alone, its row to this lane's
# rows, and what follows it runs although it failed.
lane=${lane:-}
rows="$logs/summary${lane:+-$lane}"

log_of() { echo "$logs/${1//[^A-Za-z0-9]/-}.log"; }

# step NAME COMMAND…: runs it once, with its output in a log too; its failure ends the run. A command that
# cannot run on this machine ends with 77, and its last line says why.
step() {
    local name=$1 since=$SECONDS log status=0
    shift
    log=$(log_of "$name")
    printf '\n== %s (%s)\n' "$name" "$(date +%H:%M:%S)"
    if [ -n "$lane" ]; then "$@" >"$log" 2>&1 || status=$?; else "$@" 2>&1 | tee "$log" || status=$?; fi
    if [ "$status" = 77 ]; then
        skipped "$name" "$(sed -n '$s/^skipped: //p' "$log")"
        return
    fi
    ended "$name" "$((SECONDS - since)) s" "$status" "$(grep -E "$sums" "$log" || tail -n 1 "$log")"
    # Passed at a second try: a bug to be mended, which nobody should have to look for.
    grep -E '^ *FLAKY ' "$log" >>"$logs/flaky" || true
    if [ -n "$lane" ]; then
        [ "$status" = 0 ] || printf '\n== FAILED: %s, see %s\n' "$name" "${log#"$PWD/"}"
        return 0
    fi
    return "$status"
}

# skipped NAME WHY: a step that this machine cannot run.
skipped() { ended "$1" skipped 0 "$2"; }

ended() {
    printf '%s\n' "$4" | awk -v name="$1" -v time="$2" -v verdict="$([ "$3" = 0 ] && echo ok || echo FAILED)" \
        'NR == 1 { printf "%-6s %-34s %8s  %s\n", verdict, name, time, $0; next } { printf "%51s %s\n", "", $0 }' >>"$rows"
}

summary() {
    printf '\n== what each step said (%d s in all)\n' "$SECONDS"
    cat "$logs/summary"
    if [ -s "$logs/flaky" ]; then
        printf '\n== FLAKY: failed once, passed at the second try; find out why\n'
        sort -u "$logs/flaky"
    fi
}

# wanted PROGRAM PACKAGE: whether the machine has it, after an attempt to install it.
wanted() {
    if ! command -v "$1" >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -qq && apt-get install -y -qq "$2" >/dev/null
    fi
    command -v "$1" >/dev/null
}

# unpacked PROGRAM PACKAGE: the same, for a package that would start a service or bring others that nothing needs: its files alone, in the cache,
# where tests look. Takes no root, but apt's lists.
unpacked() {
    local folder="$cache/debian/$2" work
    command -v "$1" >/dev/null || [ -x "$folder/usr/bin/$1" ] && return
    [ "$(id -u)" != 0 ] || apt-get update -qq
    work=$(mktemp -d)
    (cd "$work" && apt-get download -qq "$2" && dpkg -x "$2"_*.deb files && mkdir -p "$cache/debian" && rm -rf "$folder" && mv files "$folder")
    rm -rf "$work"
    [ -x "$folder/usr/bin/$1" ]
}
