# SPDX-License-Identifier: Apache-2.0
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def header() -> Path:
    return ROOT / "runtime/include/hisparse_rt/hisparse_rt.h"


@pytest.fixture(scope="session")
def build() -> Path:
    """The release build that the installed package came from."""
    path = ROOT / "build/release"
    assert (path / "build.ninja").exists(), "make test builds it"
    return path


@pytest.fixture(scope="session")
def package() -> Path:
    """The installed package's folder."""
    return Path(importlib.util.find_spec("hisparse_rt").origin).parent
