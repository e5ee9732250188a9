# SPDX-License-Identifier: Apache-2.0
"""The demo model, as `make demo` and `make test` fetch it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".demo"
DATA = ROOT / "tests" / "data"


def gguf() -> Path:
    """Path of the GGUF file; skips the test if there is none, or fails it where HSR_REQUIRE_DEMO is set."""
    files = sorted(FOLDER.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    reason = f"{len(files)} GGUF files in {FOLDER}, not one: run `make demo` once to fetch the demo model"
    if os.environ.get("HSR_REQUIRE_DEMO"):
        pytest.fail(reason)
    pytest.skip(reason)
