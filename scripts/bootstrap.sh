#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prepare a fresh Debian or Ubuntu machine: system packages, then .venv with everything to build, run and test from it.
#
#   scripts/bootstrap.sh          what "make demo" and "make test" need
#   scripts/bootstrap.sh check    also the other compilers of "make check"
#
# Missing system packages are installed as root or through sudo when it asks for no password. Otherwise the line to type
# is printed, and the script goes on if only optional packages are missing. $PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "bootstrap: $*" >&2; }

find_python() {
    local p
    for p in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$p" ] && "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$p"
            return
        fi
    done
}

# The answer lists what is missing, required first; called again after an installation to see what still is.
look() {
    required=() optional=()
    python=$(find_python)
    command -v cc >/dev/null || required+=(gcc libc6-dev)
    if [ -z "$python" ]; then
        required+=(python3 python3-venv python3-dev)
    else
        # Debian's own interpreters come in pieces, named after their version unless they are the default one.
        local name=python3
        [ "$python" = /usr/bin/python3 ] || name=$(basename "$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')")
        "$python" -c 'import ensurepip, venv' 2>/dev/null || required+=("$name-venv")
        "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || required+=("$name-dev")
    fi
    command -v c++ >/dev/null || optional+=(g++)
    command -v pkg-config >/dev/null || optional+=(pkg-config)
    [ -e /usr/include/liburing.h ] || optional+=(liburing-dev)
    if [ "$goal" = check ]; then
        command -v clang >/dev/null || optional+=(clang)
        if [ "$(uname -m)" = x86_64 ]; then
            command -v aarch64-linux-gnu-gcc >/dev/null || optional+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
            command -v qemu-aarch64 >/dev/null || optional+=(qemu-user)
        fi
    fi
}

install_system() {
    local sudo=()
    if [ "$(id -u)" != 0 ]; then
        sudo=(sudo -n)
    fi
    if ! command -v apt-get >/dev/null || ! "${sudo[@]}" true 2>/dev/null; then
        return 1
    fi
    say "installing $*"
    "${sudo[@]}" apt-get update -qq </dev/null &&
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Dpkg::Use-Pty=0 --no-install-recommends "$@" \
            </dev/null >/dev/null
}

goal=${1:-test}
look
missing=("${required[@]}" "${optional[@]}")
if [ ${#missing[@]} -gt 0 ]; then
    install_system "${missing[@]}" || true
    look
    missing=("${required[@]}" "${optional[@]}")
fi
if [ ${#missing[@]} -gt 0 ]; then
    say "missing system packages; on Debian or Ubuntu type:"
    say "    sudo apt-get install -y ${missing[*]}"
    [ ${#required[@]} = 0 ] || exit 1
    say "going on, they are optional"
fi

if [ ! -x .venv/bin/python ]; then
    say "creating .venv with $("$python" --version)"
    "$python" -m venv .venv
fi

# pyproject.toml is the one list of Python packages; the package itself is installed later, from a build folder that stays.
mapfile -t packages < <(.venv/bin/python - <<'PY'
import tomllib
with open("pyproject.toml", "rb") as f:
    t = tomllib.load(f)
print(*t["build-system"]["requires"], *t["project"]["dependencies"], *t["project"]["optional-dependencies"]["test"], sep="\n")
PY
)
say "installing Python packages into .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check "${packages[@]}" </dev/null
