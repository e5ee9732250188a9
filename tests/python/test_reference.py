# SPDX-License-Identifier: Apache-2.0
"""The oracle itself, against logits that the transformers library computed in float32."""

import json
from pathlib import Path

import numpy as np
import pytest
import reference

pytestmark = pytest.mark.python

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_reference_matches_transformers(name):
    ids = json.loads((FIXTURES / name / "ids.json").read_text())
    expected = np.fromfile(FIXTURES / name / "logits.f32", "<f4").reshape(len(ids), -1)
    assert np.abs(reference.logits(FIXTURES / name, ids) - expected).max() < 2e-5
