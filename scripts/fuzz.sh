#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzz the readers of untrusted files, starting from the corpus of damaged files: scripts/fuzz.sh [SECONDS]
# The converter's inputs get half the time. The rest needs clang with libFuzzer. Finds stay in build/fuzz/,
# and the next run starts from what this one learnt.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
python tests/fuzz/fuzz_convert.py "$((seconds / 2))"
if ! command -v clang >/dev/null; then
    echo "fuzz: no clang, so only the corpus is replayed" >&2
    exec meson test -C build/release --suite fuzz --print-errorlogs
fi
mkdir -p build/fuzz/found
clang -std=gnu17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Iruntime -Iruntime/include \
    tests/fuzz/fuzz_container.c runtime/container/*.c runtime/base/*.c -lm -lpthread -o build/fuzz/container
python3 tests/fuzz/make_corpus.py build/fuzz/corpus
cd build/fuzz
./container -max_total_time="$seconds" -timeout=5 -rss_limit_mb=512 -max_len=65536 -print_final_stats=1 found corpus
