#!/usr/bin/env bash
# An agent and its router in two network namespaces that only a virtual cable joins: the agent dials out and listens
# on no TCP port at all, and a stream is served through it. Needs root, iproute2 and curl; without them it says so and
# ends with 77. Takes the program from HOSTLER_BIN, else target/release, else target/debug. The last line it prints is
# "N passed, N failed".
set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
router_side=hostler-router-$$
agent_side=hostler-agent-$$
router_address=10.77.0.1
agent_address=10.77.0.2
folder=
router_pid=
agent_pid=
passed=0
failed=0

skip() {
    echo "skipped: $*"
    exit 77
}

give_up() {
    echo "FAIL $*"
    failed=$((failed + 1))
    [ -n "$folder" ] && tail -n 30 "$folder"/*.stderr
    exit 1
}

# check WHAT COMMAND…: counts the command's success under these words.
check() {
    local what=$1
    shift
    if "$@"; then
        echo "ok   $what"
        passed=$((passed + 1))
    else
        echo "FAIL $what"
        failed=$((failed + 1))
    fi
}

at_router() { ip netns exec "$router_side" "$@"; }
at_agent() { ip netns exec "$agent_side" "$@"; }

# within SECONDS COMMAND…: runs the command again and again until it succeeds.
within() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

# end PID: SIGTERM, and SIGKILL to what has not ended after 20 s. `ip netns exec` becomes the program it runs; started
# in the background by itself, not in a function, its id is the program's.
end() {
    [ -n "$1" ] || return 0
    kill -TERM "$1" 2>/dev/null
    within 20 gone "$1" || { kill -KILL "$1" 2>/dev/null; false; }
}

gone() { ! kill -0 "$1" 2>/dev/null; }
empty() { [ -z "$(ip netns pids "$1" 2>/dev/null)" ]; }

clean_up() {
    trap - EXIT INT TERM
    check "the agent ends when asked" end "$agent_pid"
    check "the router ends when asked" end "$router_pid"
    for namespace in "$agent_side" "$router_side"; do
        check "no process is left in $namespace" within 5 empty "$namespace"
        for pid in $(ip netns pids "$namespace" 2>/dev/null); do kill -KILL "$pid"; done
        ip netns delete "$namespace" 2>/dev/null
    done
    [ "$failed" -eq 0 ] || [ -z "$folder" ] || tail -n 20 "$folder"/*.stderr
    rm -rf "$folder"
    echo "$passed passed, $failed failed"
    exit $((failed > 0))
}

# printed WORD: the rest of the router's line that begins with it; fails while there is none.
printed() { sed -n "s/^$1 *//p" "$folder/router.stdout" | grep .; }
listens() { printed edge && printed agents && printed admin && printed socket; }
ready() { at_router "$hostler" ps --admin "$(printed socket)" --json 2>/dev/null | grep -q '"phase": *"ready"'; }
no_listener() { [ -z "$(at_agent ss -Hltn)" ]; }
a_listener() { [ -n "$(at_router ss -Hltn)" ]; }
dialled_out() { at_agent ss -Htn state established | grep -q "$router_address:"; }

stream() {
    at_router curl --silent --show-error --no-buffer --max-time 30 "$(printed edge)/completions" \
        --header 'content-type: application/json' \
        --data '{"model": "tiny", "prompt": "across", "max_tokens": 200, "stream": true}' >"$folder/stream"
}

whole_stream() {
    [ "$(grep -c '^data: {' "$folder/stream")" -gt 100 ] &&
        grep -q '"finish_reason": *"length"' "$folder/stream" &&
        [ "$(grep . "$folder/stream" | tail -n 1)" = "data: [DONE]" ]
}

[ "$(id -u)" -eq 0 ] || skip "network namespaces need root"
for tool in ip ss curl; do
    command -v "$tool" >/dev/null || skip "$tool is missing (ip and ss are in iproute2)"
done
hostler=${HOSTLER_BIN:-}
for build in release debug; do
    [ -n "$hostler" ] || [ ! -x "$repository/target/$build/hostler" ] || hostler=$repository/target/$build/hostler
done
[ -x "$hostler" ] || { echo "no hostler binary: run \`cargo build --release\`, or set HOSTLER_BIN"; exit 1; }
ip netns add "$router_side" 2>/dev/null || skip "this system lets nobody make network namespaces"

trap clean_up EXIT INT TERM
folder=$(mktemp -d)
ip netns add "$agent_side" &&
    ip link add to-agent netns "$router_side" type veth peer name to-router netns "$agent_side" &&
    at_router ip address add "$router_address/30" dev to-agent &&
    at_agent ip address add "$agent_address/30" dev to-router &&
    at_router ip link set to-agent up && at_agent ip link set to-router up &&
    at_router ip link set lo up && at_agent ip link set lo up || give_up "the two namespaces could not be joined"

"$hostler" init --dir "$folder/fleet" --out "$folder/token" 2>/dev/null || give_up "the fleet's authority could not be made"
ip netns exec "$router_side" "$hostler" router --listen 127.0.0.1:0 --agents-listen "$router_address:0" --admin-listen 127.0.0.1:0 --operators-socket "$folder/router.sock" --tls-dir "$folder/fleet" \
    >"$folder/router.stdout" 2>"$folder/router.stderr" &
router_pid=$!
within 10 listens >/dev/null || give_up "the router did not print its addresses within 10 s"

ip netns exec "$agent_side" "$hostler" agent --router "$(printed agents)" --node far --engine simulated --replicas 1 \
    --join-token-file "$folder/token" --identity-dir "$folder/identity" --run-dir "$folder/run" --log-dir "$folder/log" -- --served-model-name tiny --sim-step-ms 5 \
    >"$folder/agent.stdout" 2>"$folder/agent.stderr" &
agent_pid=$!
within 30 ready || give_up "the engine beyond the cable was not ready within 30 s"

check "ss shows the router's ports in its namespace, so it would show an agent's" a_listener
check "no TCP port listens in the agent's namespace" no_listener
check "the agent's connections go out to the router" dialled_out
stream &
curl_pid=$!
sleep 0.3
check "no TCP port listens there while a stream runs" no_listener
check "curl beside the router gets an answer" wait "$curl_pid"
check "the stream is whole: its tokens, its reason, its end" whole_stream
