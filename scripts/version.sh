#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Print the version that runtime/include/hisparse_rt/version.h states, as "major.minor.patch".
set -eu
sed -n 's/^#define HSR_VERSION_M[A-Z]*  *\([0-9]*\).*/\1/p; s/^#define HSR_VERSION_PATCH  *\([0-9]*\).*/\1/p' \
    "$(dirname "$0")/../runtime/include/hisparse_rt/version.h" | paste -s -d . -
