#!/usr/bin/env bash
# Builds what users install, in target/dist: a wheel, and a tarball with the wheel's very program, its man pages, completions and documents. The
# program runs on x86-64 with glibc 2.17 and newer (decision 26). Takes the cargo profile, `release` if none is named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile=${1:-release}
out=$PWD/target/dist
tools=$(dist/venv.sh)
# The same sources make the same wheel and tarball, whoever packs them and when; maturin reads this too.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

rm -rf "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# maturin fails where the program needs a newer glibc, or a library that not every Linux has.
PATH=$tools:$PATH maturin build --locked --profile "$profile" --target x86_64-unknown-linux-gnu --zig \
    --compatibility manylinux_2_17 --auditwheel check --out "$work/wheel"

"$tools/python" -m zipfile -e "$work"/wheel/*.whl "$work/unpacked"
program=$work/unpacked/hostler
install -m 755 "$work"/unpacked/hostler-*.data/scripts/hostler "$program"
name=hostler-$("$program" --version | cut -d ' ' -f 2)-x86_64-linux

# Laid out as a prefix such as ~/.local, where shells and `man` look.
prefix=$work/$name
documents=$prefix/share/doc/hostler
bash_completions=$prefix/share/bash-completion/completions
zsh_completions=$prefix/share/zsh/site-functions
fish_completions=$prefix/share/fish/vendor_completions.d
mkdir -p "$prefix/bin" "$documents" "$bash_completions" "$zsh_completions" "$fish_completions"
cp "$program" "$prefix/bin/"
"$program" docs man "$prefix/share/man/man1"
"$program" completions bash >"$bash_completions/hostler"
"$program" completions zsh >"$zsh_completions/_hostler"
"$program" completions fish >"$fish_completions/hostler.fish"
cp -R LICENSE README.md CHANGELOG.md docs deploy "$documents/"

mkdir -p "$out"
tar --create --directory "$work" --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" "$name" |
    gzip -9 --no-name >"$out/$name.tar.gz"
mv "$work"/wheel/*.whl "$out/"
ls -l "$out"
