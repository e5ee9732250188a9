#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The slow checks behind "make check": other compilers, warnings as errors, sanitizers, old processors, another architecture.
# Expects what "make test" prepares. What finds most comes first, in case there is a limit of time. A step whose tool is missing says so
# and is left out; any failure ends the script.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh check

has() { command -v "$1" >/dev/null; }
step() { printf '\n== %s (after %d min)\n' "$*" $((SECONDS / 60)); }
left_out=()

# configure FOLDER OPTION...: set a build folder up once, keep it for the next time
configure() {
    local dir=$1
    shift
    if [ ! -f "$dir/build.ninja" ]; then
        rm -rf "$dir"
        meson setup "$dir" "$@" >"build/setup.log" || { cat build/setup.log; exit 1; }
    fi
}

build() { ninja -C "$1" --quiet all meson-test-prereq; }

# With line numbers for what sanitizers report, and no more: compilers take half as long for -O1 -g1 as for -O2 -g.
sanitized=(-Doptimization=1 -Ddebug=false -Db_ndebug=false -Dc_args=-g1)

step "thread sanitizer: unit tests with threads"
CC=gcc configure build/tsan "${sanitized[@]}" -Db_sanitize=thread
build build/tsan
# Without address randomisation: the sanitizer's fixed shadow does not fit every layout of recent kernels.
TSAN_OPTIONS=halt_on_error=1 meson test -C build/tsan --quiet --print-errorlogs --timeout-multiplier 8 \
    --suite threads --wrapper "setarch $(uname -m) -R"

step "address and undefined-behaviour sanitizers: C tests"
CC=gcc configure build/asan "${sanitized[@]}" -Dwheel=true -Db_sanitize=address,undefined \
    -Dprefix="$PWD/build/asan/root" -Dpython.platlibdir=site -Dpython.purelibdir=site
build build/asan
export ASAN_OPTIONS=abort_on_error=0:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
meson test -C build/asan --quiet --print-errorlogs --timeout-multiplier 4

# Test programs are compiled too, so one -Werror build covers all C files. The release build is one if it was made with WERROR=1.
step "warnings as errors: gcc"
gcc=build/release
if ! grep -q -- ' -Werror ' $gcc/compile_commands.json || ! cc --version | grep -q 'Free Software'; then
    gcc=build/werror-gcc
    CC=gcc configure $gcc --werror
fi
build $gcc

# What happens when requests are refused is no question of the compiler.
step "warnings as errors: clang, and what it makes of the kernels"
if has clang; then
    CC=clang configure build/werror-clang --werror
    build build/werror-clang
    meson test -C build/werror-clang --quiet --print-errorlogs --no-suite faults
else
    left_out+=(clang)
fi

# Not for AVX2: this emulator loads the lanes that a masked load hides, so that reads at the edge of a page fault in it alone.
step "a processor without AVX (emulated)"
if [ "$(uname -m)" = x86_64 ] && has qemu-x86_64; then
    meson test -C $gcc --quiet --print-errorlogs --timeout-multiplier 10 --wrapper "qemu-x86_64 -cpu Nehalem" reference
else
    left_out+=(qemu-x86_64)
fi

step "aarch64 (cross-compiled, emulated)"
if has aarch64-linux-gnu-gcc; then
    configure build/aarch64 --cross-file tests/cross/aarch64.ini --werror
    build build/aarch64
    if has qemu-aarch64; then
        meson test -C build/aarch64 --quiet --print-errorlogs --timeout-multiplier 10 container reference
    fi
else
    left_out+=(aarch64-linux-gnu-gcc)
fi

step "address and undefined-behaviour sanitizers: Python tests"
meson install -C build/asan --quiet
# Python itself leaks by design, so leaks are looked for in the C tests only; and freed memory stays in quarantine, so resident
# memory says nothing here.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 \
    PYTHONPATH=build/asan/root/site python -m pytest -q tests/python -m "not slow and not python" \
    --deselect tests/python/test_front.py::test_memory_does_not_grow_with_calls

printf '\ncheck: all passed after %d min%s\n' $((SECONDS / 60)) "${left_out:+; left out for want of a tool: ${left_out[*]}}"
