#!/usr/bin/env bash
# What `make dist` made, installed and used (install.py): on this host, and in a Debian 11, whose glibc is 2.31. That is installed into the cache
# once (260 MB, two minutes). Also that the program needs nothing newer than glibc 2.17. Needs objdump; the Debian 11 needs root and debootstrap.
# Without them it says so and ends with 77. Takes the folder of wheel and tarball, target/dist if none is named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

dist=$(realpath "${1:-target/dist}")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hostler
newest_glibc=GLIBC_2.17
release=bullseye

skip() {
    echo "skipped: $*"
    exit 77
}

# check_symbols PROGRAM: every symbol that it takes from a library is one of glibc's, and none is newer. A program that takes none is static, and
# could not load the driver's library.
check_symbols() {
    local versions newest
    versions=$(objdump -T "$1" | grep -F '*UND*' | grep -oE '\([^)]+\)' | tr -d '()' | sort -Vu) || true
    newest=$(grep '^GLIBC_[0-9.]*$' <<<"$versions" | tail -n 1) || true
    if grep -qv '^GLIBC_[0-9.]*$' <<<"$versions" || [ "$(printf '%s\n' "$newest" "$newest_glibc" | sort -V | tail -n 1)" != "$newest_glibc" ]; then
        printf 'FAIL the program may need glibc up to %s and nothing else; it needs:\n%s\n' "$newest_glibc" "$versions"
        return 1
    fi
    echo "ok   the newest that the program needs is $newest"
}

# make_old_root ROOT: a Debian of then, with Python.
make_old_root() {
    [ ! -d "$1" ] || return 0
    rm -rf "$1.new"
    mkdir -p "$cache"
    debootstrap --variant=minbase --include=python3-venv "$release" "$1.new" >"$cache/debootstrap.log" ||
        { tail -n 5 "$cache/debootstrap.log"; return 1; }
    mv "$1.new" "$1" # last: an interrupted install is begun again
}

# in_old_root ROOT COMMAND…: runs it there, with this folder as /tmp/tests and that of wheel and tarball as /tmp/dist. Mounts and processes are its
# own, and gone when it ends.
in_old_root() {
    local root=$1
    shift
    # shellcheck disable=SC2016 # the inner shell expands them
    unshare --mount --pid --fork --kill-child sh -euc '
        root=$1 tests=$2 dist=$3
        shift 3
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/tmp"
        mkdir "$root/tmp/tests" "$root/tmp/dist"
        mount --bind "$tests" "$root/tmp/tests"
        mount --bind "$dist" "$root/tmp/dist"
        exec chroot "$root" env -i PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8 "$@"
    ' sh "$root" "$PWD/tests/dist" "$dist" "$@"
}

command -v objdump >/dev/null || skip "objdump is missing (Debian: binutils)"
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar -xzf "$dist"/hostler-*.tar.gz -C "$unpacked" --strip-components=1
check_symbols "$unpacked/bin/hostler"
python3 tests/dist/install.py "$dist"

[ "$(id -u)" -eq 0 ] || skip "a Debian 11 needs root; on this host all is well"
command -v debootstrap >/dev/null || skip "debootstrap is missing; on this host all is well"
make_old_root "$cache/$release"
in_old_root "$cache/$release" python3 /tmp/tests/install.py /tmp/dist
