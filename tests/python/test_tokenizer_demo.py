# SPDX-License-Identifier: Apache-2.0
"""The demo model's tokenizer, as the converter embeds it, on strings that are easy to split wrongly.

tools/make_tokenizer_strings.py wrote the strings and, with a tokenizer of its own, their ids.
"""

from __future__ import annotations

import json

import demo
import hisparse_rt as hs
import pytest
from hisparse_rt.tools.convert import convert

pytestmark = pytest.mark.python

STRINGS = json.loads((demo.DATA / "pretokenizer" / "strings.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "q4.hsr"
    convert(demo.gguf(), path, "q4")
    with hs.load(path, threads=1) as model:
        yield model
    path.unlink()


def test_ids(model):
    assert len(STRINGS) == 300
    wrong = [(text, ids, found) for text, ids in STRINGS if (found := model.encode(text).tolist()) != ids]
    assert not wrong, f"{len(wrong)} strings, (text, expected, found): {wrong[:5]}"


def test_text_comes_back(model):
    # A few bytes, such as that of U+0004, have no token in this vocabulary.
    lost = [text for text, ids in STRINGS if model.decode(ids, skip_special=False) != text]
    assert lost == ["a\u0004b", "!\u0004!", "\U00040000"]


def test_text_of_users_never_becomes_control_tokens(model):
    control = {token for token, added in model.tokenizer.get_added_tokens_decoder().items() if added.special}
    assert len(control) == 17
    for text, ids in STRINGS:
        as_text = model.encode(text, special=False).tolist()
        assert not control & set(as_text), text
        if not control & set(ids):
            assert as_text == ids, text
        elif "\u0004" not in text:
            assert model.decode(as_text, skip_special=False) == text
